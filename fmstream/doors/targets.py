"""What the user handed over: which modules are in it, and what is to be called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from fmstream.config import StreamConfig
from fmstream.errors import ConfigError


def find_roots(pipeline: Any, modules: Any = None) -> dict[str, nn.Module]:
    """Outermost modules by name.

    Args:
        pipeline: an ``nn.Module`` (its name is empty), a pipeline with ``components``, a mapping or sequence of
            modules, a bound method of one of these, or any object with modules among its attributes.
        modules: modules named by the caller, instead: one, a mapping or a sequence.

    Raises:
        ConfigError: no module with parameters is found.
    """
    source = pipeline if modules is None else modules
    owner = getattr(source, "__self__", None)
    if owner is not None and not isinstance(source, nn.Module):
        source = owner
    named = dict(_named_modules(source))
    if not named:
        what = "modules=" if modules is not None else type(pipeline).__name__
        raise ConfigError(
            f"no nn.Module found in {what}: hand over a pipeline or a module, or name the modules that the callable "
            "uses: modules={'unet': unet}"
        )
    return _outermost(named)


def _named_modules(source: Any) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(source, nn.Module):
        return [("", source)]
    if isinstance(source, Mapping):
        items: Iterable[tuple[Any, Any]] = source.items()
    elif isinstance(source, list | tuple | set | frozenset):
        items = ((str(i), item) for i, item in enumerate(source))
    elif isinstance(getattr(source, "components", None), Mapping):
        items = source.components.items()
    else:
        items = getattr(source, "__dict__", {}).items()
    return [(str(name), item) for name, item in items if isinstance(item, nn.Module)]


def _outermost(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Without modules that are part of another one, or named twice."""
    inner = {id(m) for root in named.values() for m in root.modules() if m is not root}
    seen: set[int] = set()
    roots = {}
    for name, module in named.items():
        if id(module) not in inner and id(module) not in seen:
            seen.add(id(module))
            roots[name] = module
    return roots


def find_call(pipeline: Any, method: str | None) -> Callable[..., Any]:
    """What to call: the object itself, or its method of that name.

    Raises:
        ConfigError: there is no such method, or the object cannot be called.
    """
    if method is None:
        if not callable(pipeline):
            raise ConfigError(f"{type(pipeline).__name__} cannot be called: name a method, such as method='generate'")
        return pipeline  # type: ignore[no-any-return]
    found = getattr(pipeline, method, None)
    if not callable(found):
        near = difflib.get_close_matches(method, [n for n in dir(pipeline) if not n.startswith("_")], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"method={method!r}: {type(pipeline).__name__} has no such method{hint}")
    return found  # type: ignore[no-any-return]


def refuse_shared_names(call: Callable[..., Any], given: Iterable[str], passed_on: Iterable[str]) -> None:
    """Refuse an argument name that both fmstream and the pipeline know, and an option that would go to the pipeline.

    Raises:
        ConfigError: one of the options in ``given`` is also a parameter of ``call``, or one of the arguments in
            ``passed_on`` is an option of fmstream that ``call`` does not name.
    """
    target = call.forward if isinstance(call, nn.Module) else call
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # a built-in that does not tell its parameters
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in given:
        if name in parameters:
            raise ConfigError(
                f"{name}= is an option of fmstream and an argument of the pipeline: "
                f"write call_kwargs={{{name!r}: ...}} for the pipeline's, config={{{name!r}: ...}} for fmstream's"
            )
    options = {field.name for field in fields(StreamConfig)}
    for name in passed_on:
        if name in options and name not in parameters:
            raise ConfigError(
                f"{name}= is an option of StreamConfig: give it as config={{{name!r}: ...}}"
                + (f", or as call_kwargs={{{name!r}: ...}} if the pipeline's **kwargs know it" if takes_any else "")
            )
