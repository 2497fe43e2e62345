"""Every error that bcg raises, under one base class.

BcgError
├── ConfigError            an option or environment variable has a value that is not accepted
├── BackendError           the requested backend cannot run here
├── NotAModuleError        wrap() was given something that is not an nn.Module
├── MissingDependencyError an optional package is not installed
├── CaptureError           a capture did not lead to a graph
│   ├── NestedCaptureError       a capture was begun inside another one on the same thread
│   ├── HostileOperationError    an operation cannot be captured and cannot be worked around
│   ├── StateWriteError          the forward writes to something that outlives the call
│   ├── SegmentLimitError        more segments than ``max_segments``
│   ├── VerificationError        the captured entry does not reproduce eager
│   │   └── InterferenceError    another thread drew random numbers during the comparison
│   └── DoesNotPayError          eager is as fast as the captured entry
├── ReplayError            a captured graph could not be replayed
│   └── GuardMiss                a recorded host value or shape is another one now
└── PlanError              a warm-up plan cannot be run as asked

The runner turns every CaptureError and every GuardMiss into an eager call with a counted reason; they reach a user only
through the primitives (`BreakableCUDAGraphCapture`, `BreakableCUDAGraph.replay`).
"""

from __future__ import annotations


class BcgError(Exception):
    """Base class of all errors raised by bcg."""


class ConfigError(BcgError, ValueError):
    """An option or environment variable has a value that is not accepted."""


class BackendError(BcgError, RuntimeError):
    """The requested backend cannot run here."""


class NotAModuleError(BcgError, TypeError):
    """`bcg.wrap` was given something that is not a callable ``torch.nn.Module``."""


class MissingDependencyError(BcgError, ImportError):
    """A part of bcg needs a package that is not installed; the message names the extra that brings it."""


class CaptureError(BcgError, RuntimeError):
    """A capture did not lead to a graph; the message says why."""


class NestedCaptureError(CaptureError):
    """A capture was begun inside another one on the same thread."""


class HostileOperationError(CaptureError):
    """An operation can neither be captured nor be worked around."""


class StateWriteError(CaptureError):
    """The forward writes to an argument, a parameter, a buffer or Python state that outlives the call.

    Attributes:
        moving: What of the module's Python state is another with every forward; empty for other writes.
    """

    def __init__(self, message: str, moving: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.moving = moving


class SegmentLimitError(CaptureError):
    """A capture needed more segments than ``max_segments`` allows."""


class VerificationError(CaptureError):
    """A captured entry, replayed on fresh inputs, does not reproduce eager."""


class InterferenceError(VerificationError):
    """A captured entry could not be verified, since another thread drew from a generator meanwhile."""


class DoesNotPayError(CaptureError):
    """A captured entry is not faster than eager by ``min_speedup``, so it is not kept."""


class ReplayError(BcgError, RuntimeError):
    """A captured graph could not be replayed."""


class GuardMiss(ReplayError):
    """A host value or shape that the capture relied on is another one in this call.

    Attributes:
        step: The guard or eager break that noticed, where there is one.
    """

    def __init__(self, message: str, step: object = None) -> None:
        super().__init__(message)
        self.step = step


class PlanError(BcgError, ValueError):
    """A warm-up plan cannot be run as asked."""
