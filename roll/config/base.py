"""The base of every config class."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Strict and frozen: an unknown key is an error, a value never changes after validation.

    Validation may reject, never rewrite; what is derived is a property. The string under a field
    is its help text.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
