"""Stand-ins for libraries that SGLang imports but that exist only for machines with a GPU.

Without a GPU, `server.py` appends this folder to the import path of SGLang's processes. It comes
last, so that an installed library is found before its stand-in.
"""
