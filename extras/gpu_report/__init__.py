"""What a machine with GPUs can tell about this repository: python -m extras.gpu_report"""
