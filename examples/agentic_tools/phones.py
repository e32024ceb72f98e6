"""Server of the Model Context Protocol over stdio that knows phone numbers.

python examples/agentic_tools/phones.py FILE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("phones")
numbers: dict[str, str] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


@server.tool()
def phone(name: str) -> str:
    """Tells the phone number of a person.

    Args:
        name: name of the person.
    """
    return numbers[name]


if __name__ == "__main__":
    server.run("stdio")
