"""Names of the processes of a transfer, in messages between them and to the user."""

LEADER = "the sender"


def sender_name(index: int) -> str:
    return f"sender {index}"


def receiver_name(index: int) -> str:
    return f"receiver {index}"
