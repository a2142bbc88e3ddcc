"""Whether the model hub can be asked, found out once and fast: its own library retries for half a minute."""

from __future__ import annotations

import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

BY_CHOICE = "HF_HUB_OFFLINE is set"


@cache
def unreachable(seconds: float = 3.0) -> str:
    """Return why Hugging Face's hub cannot be asked, or nothing; its library then does not try either.

    Args:
        seconds: To wait for an answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return BY_CHOICE
    if getproxies():
        return ""  # who knows
    where = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((where.hostname or "", where.port or 443), seconds).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{where.hostname} cannot be reached: {error.strerror or error}"
    return ""
