"""Libraries that SGLang imports and a machine without an accelerator cannot have.

This folder goes to the very end of the import path of SGLang's own processes, and only without a
GPU (`server.py`): a library that is installed is found before its stand-in.
"""
