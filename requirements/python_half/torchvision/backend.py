"""Build backend (PEP 517) that makes a wheel of the Python half of the published torchvision.

It takes the published wheel from the configured package index, leaves out the compiled libraries,
and declares the two operators that torchvision registers without a look at whether they exist:

    RuntimeError: operator torchvision::nms does not exist

Transforms and processors work. Operators such as `nms`, and the decoders of `torchvision.io`, do
not: a call raises an error.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.28.0"
LOCAL_VERSION = f"{VERSION}+python"
"""A local version, so that `pip list` tells it from the published wheel."""
OPERATORS = """

# Added by roll's requirements: the compiled operators are left out, but torchvision registers
# further implementations of these two whether they exist or not.
for _name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
"""


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Write the wheel into `wheel_directory` and return its name.

    Raises:
        CalledProcessError: pip could not fetch the published wheel; its output says why.
    """
    name = f"torchvision-{LOCAL_VERSION}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        files = _python_half(_fetch(Path(folder)))
    info = f"torchvision-{LOCAL_VERSION}.dist-info"
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return name


def _fetch(folder: Path) -> Path:
    """Download the published wheel, without what it depends on, and return its path."""
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), f"torchvision=={VERSION}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *what], check=True)
    (wheel,) = folder.glob("torchvision-*.whl")
    return wheel


def _python_half(published: Path) -> dict[str, bytes]:
    """Return path -> content of the files of the new wheel, without its RECORD."""
    files = {}
    with zipfile.ZipFile(published) as wheel:
        for path in wheel.namelist():
            top, _, rest = path.partition("/")
            if top.endswith(".dist-info"):
                if rest in ("METADATA", "LICENSE", "licenses/LICENSE"):
                    files[f"torchvision-{LOCAL_VERSION}.dist-info/{rest}"] = wheel.read(path)
            elif top == "torchvision" and not path.endswith((".so", "/")):
                files[path] = wheel.read(path)
    info = f"torchvision-{LOCAL_VERSION}.dist-info"
    files["torchvision/extension.py"] += OPERATORS.encode()
    files[f"{info}/METADATA"] = _with_local_version(files[f"{info}/METADATA"])
    tag = "Wheel-Version: 1.0\nGenerator: roll\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/WHEEL"] = tag.encode()
    return files


def _with_local_version(metadata: bytes) -> bytes:
    """Return METADATA whose version is the local one; the published one may have its own label."""
    lines = metadata.decode().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("Version: "))
    lines[at] = f"Version: {LOCAL_VERSION}\n"
    return "".join(lines).encode()


def _digest(data: bytes) -> str:
    """Return the SHA-256 of a file as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
