"""Base of every config class."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Strict and frozen model: an unknown key is an error, and no value changes after validation.

    Validation may reject a value, but never change one; a derived value is a property. The string
    under a field is the help text of the field.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    absent: ClassVar[Mapping[str, str]] = {}
    """Keys that a user may expect here -> why there are none, and what to do."""

    def changed(self, *names: str) -> list[str]:
        """Return which of these settings differ from their defaults.

        Rules ask this, and not what the file names: `config.yaml` of a run names every setting.
        """
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default()]
