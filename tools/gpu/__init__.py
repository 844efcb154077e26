"""Programs that a real GPU must pass: `python tools/gpu_check.py`."""
