"""Reading JSON that somebody else wrote."""

import json
from typing import Any

from dsv4kv_jax.errors import PlanError


def parse(text: str, source: str) -> Any:
    """The value of a JSON text.

    Raises:
      PlanError: not JSON, or nested or long beyond what Python reads; begins with `source`.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise PlanError(f"{source} is not JSON: {error}") from None
    except RecursionError:
        raise PlanError(f"{source} is nested too deeply to be read as JSON") from None
