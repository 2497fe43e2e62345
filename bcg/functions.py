"""Take calls of functions that modules have as globals, for a while and for chosen threads.

A dispatcher stands in every place where a module has the function, as long as anybody wants its calls. Threads that
capture at the same time share it, so that none undoes what another did; a thread that wants nothing gets the original.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Told a function and the arguments that it is about to be called with, on the thread that calls it."""

_MARK: Final = "_bcg_dispatcher"
_lock = threading.Lock()
_dispatchers: dict[int, _Dispatcher] = {}  # by the id of the function, and for ever: a module may have imported one


@contextlib.contextmanager
def redirected(*pairs: tuple[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let this thread alone call substitutes for functions, wherever a module has them as globals.

    Args:
        *pairs: Functions, and what this thread calls in their place: the inner of two nested substitutes.

    Example:
        >>> import math
        >>> with redirected((math.floor, lambda value: -1)):
        ...     math.floor(2.5)
        -1
        >>> math.floor(2.5)
        2
    """
    thread = threading.get_ident()
    taken = [(_dispatcher(function), (thread, substitute)) for function, substitute in pairs]
    with _standing([dispatcher for dispatcher, _ in taken]):
        try:
            with _lock:
                for dispatcher, entry in taken:
                    dispatcher.substitutes = [*dispatcher.substitutes, entry]
            yield
        finally:
            with _lock:
                for dispatcher, entry in taken:
                    dispatcher.substitutes = [other for other in dispatcher.substitutes if other is not entry]


@contextlib.contextmanager
def observed(functions: Sequence[Any], observer: Observer) -> Iterator[None]:
    """Tell an observer of every call of functions that modules have as globals, on whatever thread.

    Args:
        functions: The functions.
        observer: Told before each call.
    """
    dispatchers = [_dispatcher(function) for function in functions]
    with _standing(dispatchers):
        try:
            with _lock:
                for dispatcher in dispatchers:
                    dispatcher.observers = [*dispatcher.observers, observer]
            yield
        finally:
            with _lock:
                for dispatcher in dispatchers:
                    dispatcher.observers = [other for other in dispatcher.observers if other is not observer]


def original_function(function: Any) -> Any:
    """Return the function behind a dispatcher, which a module's global may be just now; any other as it is."""
    dispatcher = getattr(function, _MARK, None)
    return dispatcher.function if isinstance(dispatcher, _Dispatcher) else function


class _Dispatcher:
    """Stands for one function, and sends each call to what its thread wants."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.substitutes: list[tuple[int, Callable[..., Any]]] = []  # with their threads, the innermost last
        self.observers: list[Observer] = []
        self.users = 0
        self.places: list[tuple[dict[str, Any], str]] = []

        @functools.wraps(function)
        def send(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        setattr(send, _MARK, self)
        self.send = send

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for observer in self.observers:
            observer(self.function, args, kwargs)
        thread = threading.get_ident()
        for owner, substitute in reversed(self.substitutes):
            if owner == thread:
                return substitute(*args, **kwargs)
        return self.function(*args, **kwargs)

    def take_down(self) -> None:
        """Put the function back where the dispatcher still stands."""
        for namespace, name in self.places:
            if namespace.get(name) is self.send:
                namespace[name] = self.function
        self.places = []


def _dispatcher(function: Any) -> _Dispatcher:
    function = original_function(function)
    with _lock:
        return _dispatchers.setdefault(id(function), _Dispatcher(function))


@contextlib.contextmanager
def _standing(dispatchers: Sequence[_Dispatcher]) -> Iterator[None]:
    """Let dispatchers stand in all places of their functions while a block runs, here or in another thread."""
    with _lock:
        missing = {id(dispatcher.function): dispatcher for dispatcher in dispatchers if dispatcher.users == 0}
        for dispatcher in dispatchers:
            dispatcher.users += 1
        try:
            _put_up(missing)
        except BaseException:
            _let_go(dispatchers)
            raise
    try:
        yield
    finally:
        with _lock:
            _let_go(dispatchers)


def _let_go(dispatchers: Sequence[_Dispatcher]) -> None:
    for dispatcher in dispatchers:
        dispatcher.users -= 1
        if dispatcher.users == 0:
            dispatcher.take_down()


def _namespace(module: Any) -> dict[str, Any]:
    """Return a module's globals without asking the module, which may import itself when it is first asked."""
    try:
        namespace = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}
    return namespace if isinstance(namespace, dict) else {}


def _put_up(missing: dict[int, _Dispatcher]) -> None:
    if not missing:
        return
    for module in list(sys.modules.values()):
        namespace = _namespace(module)
        for name, value in list(namespace.items()):
            dispatcher = missing.get(id(value))
            if dispatcher is not None:
                namespace[name] = dispatcher.send
                dispatcher.places.append((namespace, name))
