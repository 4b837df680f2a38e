"""
Chats as documents: their text, and which part of it the assistant says. For masks.py.

    chat = chat_of("messages", row, where)    # of a row's messages
    chat.parts(encoder)                       # its text, as the chat template writes it

The tokenizer's own chat template writes the text. The transformers library renders it, since it
defines what a template may do. To find the assistant's part, each of its turns is rendered
twice: the conversation up to the turn, as a prompt for it, and the conversation including it.
The difference is what the model must say there, with its end-of-turn token. This works with
any template.

Some templates write a turn differently when others follow: they drop its thinking. Then each
turn becomes a document of its own, with the conversation before it.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from data.documents import encodable
from data.tokenizer import TOKENIZER

ROLES = {"human": "user", "gpt": "assistant"}  # {ShareGPT's name: that of the templates}
KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# False, or 0, says that a message is not learned: OpenAI's "weight", and others' names for it.
WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
# Of a row or a message, beside its text. The chat template does not get them.
BESIDE = ("tools", "functions", "tool_calls", "function_call", "documents", "image", "images",
          "video", "videos", "audio")


@dataclass
class Document:
    text: str
    # [(start, end)]: the characters that the model learns to predict; None for all of them.
    spans: list | None = None
    # True if a chat template wrote the text: it has its special tokens, and none are added.
    has_special_tokens: bool = False

    @property
    def key(self):
        """A string that identifies the document: its hash puts it into train or val."""
        if self.spans is None:
            return self.text
        return json.dumps((self.text, self.spans), ensure_ascii=False)


@dataclass
class Chat:
    """A conversation, before a template writes it: workers do that."""

    messages: list  # [{role, content}]

    @property
    def key(self):
        """A string that identifies the chat, like Document.key."""
        return json.dumps(self.messages, ensure_ascii=False)

    def parts(self, encoder):
        """[Document]: the whole conversation, or each of its turns if the template writes
        earlier ones differently."""
        return turns(self.messages, chat_template(encoder))


# ---------- from rows to messages ---------------------------------------------


def chat_of(column, row, where):
    """The Chat of a row; None if it has no turn of the assistant to learn, or an empty one.
    SystemExit if it is more than messages of text. where: names the row in errors."""
    names = ("messages", "conversations") if column == "text" else (column,)
    if row.keys().isdisjoint(names):
        lists = ", ".join(name for name, found in row.items() if isinstance(found, list))
        raise SystemExit(
            f"{where}: no column {' or '.join(names)}; --column takes another: {lists or 'none'}")
    # In a file of both kinds each row has both columns, and null in one.
    found = next(filter(None, map(row.get, names)), [])
    system = row.get("system") or row.get("system_prompt")
    told = [{"role": "system", "content": system}] if system else []
    messages = [message(one, where) for one in [*told, *found]]
    unknown = sorted({one["role"] for one in messages} - KNOWN_ROLES) + beside(row)
    if unknown:
        raise SystemExit(
            f"{where}: the chat template gets no {', '.join(unknown)}; rename a role to user, "
            "assistant, system or tool, and leave out rows with tools or images")
    # A first turn of the assistant has no prompt, so nothing teaches the model to say it. An empty
    # turn would teach it to end at once.
    said = [one["content"].strip() for one in messages[1:] if is_learned(one)]
    return Chat(messages) if said and all(said) else None


def is_learned(message):
    return message["role"] == "assistant" and message.get("weight") != 0


def beside(one):
    """The keys of BESIDE that a row or message has; null and empty ones are of others."""
    return [key for key in BESIDE if str(one.get(key)) not in ("None", "null", "", "[]", "{}")]


def message(one, where):
    """{role, content} of {role, content} or of ShareGPT's {from, value}; and "weight": 0 if it is
    not to be learned."""
    try:
        role = one.get("role") or one["from"]
        content = one.get("content")
        if content is None:
            content = one["value"]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        # A number is a string too, as the file writes it, but of another type.
        texts = type(role) is str and type(content) is str
        if not texts or beside(one):
            raise TypeError
    except (AttributeError, KeyError, TypeError):
        raise SystemExit(
            f"{where}: {str(one)[:80]} is not a message with a role and text; leave out rows "
            "with images, tool calls or messages of another form")
    # Some templates know more, such as reasoning_content.
    more = {key: encodable(value) for key, value in one.items() if type(value) is str}
    # As a file writes them, or of the hub's types.
    if {"0", "0.0", "false"} & {str(one.get(key)).lower() for key in WEIGHTS}:
        more["weight"] = 0
    return {**more, "role": ROLES.get(role, role), "content": encodable(content)}


# ---------- from messages to text ---------------------------------------------


class Template(NamedTuple):
    render: Any  # function: (messages, add_generation_prompt) -> text
    special: tuple  # the special tokens, one of which ends a turn


def chat_template(encoder):
    """The Template beside the encoder's tokenizer.json. SystemExit if there is none."""
    return open_template(encoder.files.get(TOKENIZER))


@cache  # a worker of prepare.py asks for each chat
def open_template(file):
    try:
        import jinja2  # noqa: F401  transformers writes with it
        import transformers
    except ImportError as e:
        raise SystemExit(f"--chat: {e}; pip install transformers jinja2")
    theirs = None
    if file:
        transformers.logging.set_verbosity_error()
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(file.parent)
    if not theirs or not theirs.chat_template:
        raise SystemExit(
            "--chat: this tokenizer has no chat template; pass --tokenizer= the directory or "
            "hub name of a model for chats, often called -Instruct")

    def render(messages, add_generation_prompt=False):
        return theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    return Template(render, tuple(theirs.get_added_vocab()))


def turns(messages, template):
    """[Document]: see Chat.parts. The spans are what the assistant says."""
    found = []
    try:
        whole = template.render(messages)
        for i, one in enumerate(messages):
            if i > 0 and is_learned(one):
                prompt = template.render(messages[:i], add_generation_prompt=True)
                text = template.render(messages[:i + 1])
                if not text.startswith(prompt):
                    raise ValueError(
                        f"it asks for a turn with {prompt[-40:]!r}, and does not begin it so")
                span = (len(prompt), end_of_turn(text, template))
                found.append(Document(text, [span], has_special_tokens=True))
    except Exception as e:  # templates raise for roles that they do not take, and much more
        reason = " ".join(str(e).split())[:200]
        start = json.dumps(messages, ensure_ascii=False)[:80]
        raise SystemExit(
            f"{start}: the chat template does not take this conversation: {reason}; leave "
            "it out, or mend the template in a copy of the tokenizer's directory")
    if all(whole.startswith(turn.text) for turn in found):
        spans = [span for turn in found for span in turn.spans]
        return [Document(whole, spans, has_special_tokens=True)]
    return found


def end_of_turn(text, template):
    """Where the turn that ends the text ends. A line break after its last special token is
    left out, since nobody says it."""
    end = len(text.rstrip())
    return end if text[:end].endswith(template.special) else len(text)
