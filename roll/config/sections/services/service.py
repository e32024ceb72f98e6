"""Settings of services that rewards ask over HTTP."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from roll.config.base import Config


class ServiceConfig(Config):
    """A service, with limits on the calls to it."""

    url: str
    """Address, `http://` or `https://`."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the key; the driver reads it. The key is sent as
    `Authorization: Bearer <key>`. null: none is sent."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one try, in seconds."""
    tries: int = Field(default=5, ge=1)
    """Number of tries of one call. A call is tried again if the connection breaks, if there is no
    answer in time, or if the service says that it is overloaded or broken (408, 425, 429, 5xx)."""
    concurrency: int = Field(default=64, ge=1)
    """Number of calls under way at once, over all workers of the run."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Number of tries that begin in a minute, over all workers of the run. null: no limit."""

    @field_validator("url")
    @classmethod
    def _is_a_web_address(cls, url: str) -> str:
        """Return the address unchanged; ValueError if it is not http or https, names no host, or
        holds a user or password."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("must not hold a password; name its variable in `api_key_env`")
        return url
