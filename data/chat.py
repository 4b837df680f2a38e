"""
Chats as text, and what in it the assistant says.

    text = conversation(row, column, where)    # its messages, as JSON
    turns(text, template)    # [(what the chat template makes of it, spans of the assistant's)]

The tokenizer's own chat template writes them, by the transformers library, which defines what
such a template may do. What the assistant says is found by writing the conversation up to
its turn, as one asks the model for it, and then with the turn: the difference is what the
model has to say there, its end-of-turn token too. That needs nothing of the template itself.

Some templates write an earlier turn otherwise than the last one: they drop its thinking. Then
each turn becomes a document of its own, with the conversation up to it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROLES = {"human": "user", "gpt": "assistant"}  # {ShareGPT's name: that of the templates}


# ---------- rows --------------------------------------------------------------


def conversation(row, column, where):
    """The messages of a row, as JSON; "" if it has no turn of the assistant to learn.
    SystemExit if they are no text. where: for the message."""
    names = ("messages", "conversations") if column == "text" else (column,)
    if row.keys().isdisjoint(names):
        lists = [name for name, found in row.items() if isinstance(found, list)]
        remedy = f"pass --column for one of {', '.join(lists)}"
        if not lists:
            remedy = 'write rows as {"messages": [...]}'
        raise SystemExit(f"{where}: no column {' or '.join(names)}; {remedy}")
    # In a file of both kinds each row has both columns, and null in one.
    found = next(filter(None, map(row.get, names)), [])
    messages = [message(one, where) for one in found]
    # A turn that nothing comes before has no prompt.
    if all(one["role"] != "assistant" for one in messages[1:]):
        return ""
    return json.dumps(messages, ensure_ascii=False)


def message(one, where):
    """{role, content} of {role, content} or of ShareGPT's {from, value}."""
    try:
        role = one.get("role") or one["from"]
        content = one.get("content")
        if content is None:
            content = one.get("value")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        texts = isinstance(role, str) and isinstance(content, (str, type(None)))
        if not texts or one.get("tool_calls"):
            raise TypeError
    except (AttributeError, KeyError, TypeError):
        raise SystemExit(
            f"{where}: {str(one)[:80]} is not a message with a role and text; leave out rows "
            "with images, tool calls or messages of another form")
    # Some templates know more, such as reasoning_content.
    more = {key: value for key, value in one.items() if isinstance(value, str)}
    return {**more, "role": ROLES.get(role, role), "content": content or ""}


# ---------- text --------------------------------------------------------------


class Template(NamedTuple):
    render: Any  # function: (messages, add_generation_prompt) -> text
    special: tuple  # the tokens that are no text, one of which ends a turn


@cache  # a worker of prepare.py asks for each chunk
def chat_template(file):
    """The Template beside a tokenizer.json. SystemExit if there is none."""
    try:
        import jinja2  # noqa: F401  transformers writes with it
        import transformers
    except ImportError as e:
        raise SystemExit(f"--chat: {e}; pip install transformers jinja2")
    theirs = None
    if file:
        transformers.logging.set_verbosity_error()
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(Path(file).parent)
    if not theirs or not theirs.chat_template:
        raise SystemExit(
            "--chat: this tokenizer has no chat template; pass --tokenizer= the directory or "
            "hub name of a model for chats, often called -Instruct")

    def render(messages, add_generation_prompt=False):
        return theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    return Template(render, tuple(theirs.get_added_vocab()))


def turns(text, template):
    """[(text, [(start, end) of the characters that the assistant says])]: of the whole
    conversation, or of each turn if the template writes earlier ones otherwise."""
    messages = json.loads(text)
    found = []
    try:
        whole = template.render(messages)
        for i, one in enumerate(messages):
            if one["role"] == "assistant" and i > 0:
                prompt = template.render(messages[:i], add_generation_prompt=True)
                written = template.render(messages[:i + 1])
                if not written.startswith(prompt):
                    raise ValueError(
                        f"it asks for a turn with {prompt[-40:]!r}, and does not begin it so")
                found.append((written, [(len(prompt), end_of_turn(written, template))]))
    except Exception as e:  # templates raise for roles that they do not take, and much more
        reason = " ".join(str(e).split())[:200]
        raise SystemExit(
            f"{text[:80]}: the chat template does not take this conversation: {reason}; leave "
            "it out, or mend the template in a copy of the tokenizer's directory")
    if all(whole.startswith(written) for written, _ in found):
        return [(whole, [span for _, spans in found for span in spans])]
    return found


def end_of_turn(written, template):
    """Behind its last special token a turn may have a line break, which nobody says."""
    end = len(written.rstrip())
    return end if written[:end].endswith(template.special) else len(written)
