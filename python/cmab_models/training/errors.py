"""Why a training ended early."""


class Interrupted(Exception):
    """The user stopped the training; the message names the checkpoint from which to continue."""


class Diverged(ArithmeticError):
    """A loss is not finite, or the loss or the weights after the last step are not finite; the message names the
    step."""
