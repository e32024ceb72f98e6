"""Settings of a reward that a server of the user computes."""

from __future__ import annotations

from pydantic import Field

from roll.config.sections.services.service import ServiceConfig


class RemoteConfig(ServiceConfig):
    """A server that gets samples by POST and answers with their rewards
    (`docs/remote_reward.openapi.yaml`). A sample that it leaves out is asked for again, in `tries`
    calls at most."""

    batch_size: int = Field(default=32, ge=1)
    """Largest number of samples, or of groups (`per: group`), in one call."""
