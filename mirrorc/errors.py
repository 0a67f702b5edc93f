"""The exceptions that mirrorc raises; each message says what, where, why and what to do."""


class MirrorcError(Exception):
    """The base class of mirrorc's own errors. Bad arguments raise ``ValueError`` or ``TypeError`` instead."""


class CaptureError(MirrorcError):
    """The model, its loss or its backward could not be captured as one graph."""


class PassError(MirrorcError):
    """A pass has failed, or the order of the passes is wrong."""


class VerifyError(MirrorcError):
    """A program breaks a rule of its stage; it never reaches the runtime."""


class ExecutionError(MirrorcError):
    """A replica failed while it ran its program, or the step cannot run any more."""


class NonFiniteError(ExecutionError):
    """With ``check_finite=True``, a step's loss or gradient was infinite or not a number; nothing has changed."""


class CommunicationError(MirrorcError):
    """A collective could not be launched or did not finish in time."""
