"""Stand-in for the kernels that SGLang imports, which exist only for machines with a GPU.

Without a GPU, `server.py` appends this folder to the import path of SGLang's processes. It comes
last, so that an installed library is found before its stand-in.
"""
