"""The errors this library raises for bad input; all are `ValueError`s."""


class PlanError(ValueError):
    """A model, geometry or memory size that cannot be planned.

    Where too little memory is the reason, the figures are attributes as well: `required_bytes`, `available_bytes`,
    `min_blocks` and `max_context_that_fits` (tokens); otherwise they are None.
    """

    def __init__(
        self,
        message: str,
        *,
        required_bytes: int | None = None,
        available_bytes: int | None = None,
        min_blocks: int | None = None,
        max_context_that_fits: int | None = None,
    ) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        self.min_blocks = min_blocks
        self.max_context_that_fits = max_context_that_fits
