"""Why a config is refused, in the words of the person who wrote it: the key as typed, the value, the way out."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect

Tree = dict[str, "Tree | inspect.Type"]
"""The legal keys of a config, nested as they are written."""


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The known word that comes closest, or all of them when none does."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known)}"


INSTANTIATED = (
    "nothing is instantiated from a config; choose by name, as in engine=native, and give a function of your own where "
    "a setting takes one, as reward.function does"
)
REMOTE_CODE = (
    "code that comes with a model is not run; engine=vllm does so with engine.allow_unsafe=[trust_remote_code]"
)
REFUSED = dict.fromkeys(("_target_", "_partial_", "_args_", "_recursive_", "_convert_"), INSTANTIATED) | {
    "trust_remote_code": REMOTE_CODE
}
"""Keys that elsewhere run code. They are refused at any depth, also where a setting takes any keys."""


def unknown_keys(raw: Mapping[str, Any], struct: type[msgspec.Struct]) -> list[str]:
    """A sentence for each key that `struct` does not have, at any depth."""
    tree = _tree(_structs(inspect.type_info(struct)), raw)
    if refused := [f"{key} is refused: {REFUSED[word]}" for key, word in _refused(raw)]:
        return refused
    return [f"unknown key {key}: {_suggest(key, tree)}" for key in _unknown(raw, tree)]


def explain(error: msgspec.ValidationError, raw: Mapping[str, Any], struct: type[msgspec.Struct]) -> str:
    """msgspec's refusal of `raw`, with the value that was given and what is allowed instead."""
    what, _, where = str(error).removesuffix("`").replace("[...]", "[*]").partition(" - at `$.")
    info: Any = _tree(_structs(inspect.type_info(struct)), raw)
    value: Any = raw
    for key in where.split(".") if where else ():
        name, *indices = key.replace("]", "").split("[")  # `reject[0]` is an item of a list
        info, value = info[name], value[name]
        if "*" in indices:  # `sources[*]` is an item whose name msgspec does not tell
            name, value = _refused_item(value, info.value_type)
            info, where = _tree(_structs(info.value_type), value), where.replace("[*]", f".{name}", 1)
            continue
        for index in filter(str.isdecimal, indices):
            value = value[int(index)]
            below = _structs(info.item_type)
            info = _tree(below, value) if below else info.item_type
    if what.startswith("Object missing required field"):
        key = ".".join(filter(None, (where, what.split("`")[1])))
        return f"{key} is required: give it as {key}=VALUE"
    hint = ""
    if isinstance(info, inspect.LiteralType):
        hint = f"; use one of {', '.join(map(str, info.values))}"
    elif isinstance(info, inspect.StrType) and isinstance(value, int | float):
        hint = f"; quote text that looks like a number: {where}='\"{value}\"'"
    said = f"{what[0].lower()}{what[1:]}{hint}"
    return f"{where}={value}: {said}" if where else said  # else all of it is meant


def _refused_item(items: Mapping[str, Any], wanted: inspect.Type) -> tuple[str, Any]:
    """The first one that is no `wanted`: settings, or a text where that stands for some."""
    members = wanted.types if isinstance(wanted, inspect.UnionType) else (wanted,)
    takes_text = any(isinstance(member, inspect.StrType) for member in members)
    (struct,) = _structs(wanted)
    for name, item in items.items():
        if takes_text and isinstance(item, str):
            continue
        try:
            msgspec.convert(item, struct.cls)
        except msgspec.ValidationError:
            return name, item
    raise ValueError(f"nothing is wrong with {sorted(items)}")


def _tree(structs: list[inspect.StructType], raw: Any) -> Tree:
    """The keys that are legal in one of `structs`: those of the member that the tag in `raw` names."""
    given = cast(Mapping[str, Any], raw if isinstance(raw, Mapping) else {})
    # With a tag that no member has, every member's keys count as legal: the tag is what is wrong.
    chosen = [struct for struct in structs if given.get(struct.tag_field or "") == struct.tag] or structs
    tags = inspect.LiteralType(tuple(str(struct.tag) for struct in structs))
    tree: Tree = {struct.tag_field: tags for struct in structs if struct.tag_field}
    for field in (field for struct in chosen for field in struct.fields):
        below = _structs(field.type)
        tree[field.encode_name] = _tree(below, given.get(field.encode_name)) if below else field.type
    return tree


def _structs(info: inspect.Type) -> list[inspect.StructType]:
    members = info.types if isinstance(info, inspect.UnionType) else (info,)
    return [member for member in members if isinstance(member, inspect.StructType)]


def _refused(raw: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every refused key with the path to it."""
    if isinstance(raw, list | tuple):
        raw = {f"[{index}]": item for index, item in enumerate(cast(list[Any], raw))}
    if not isinstance(raw, Mapping):
        return
    for key, value in cast(Mapping[str, Any], raw).items():
        path = f"{prefix}{key}" if key.startswith("[") else f"{prefix}.{key}".lstrip(".")
        if key in REFUSED:
            yield path, key
        yield from _refused(value, path)


def _unknown(raw: Mapping[str, Any], tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, value in raw.items():
        below = tree.get(key)
        if below is None:
            yield f"{prefix}{key}"
        elif isinstance(below, dict) and isinstance(value, Mapping):
            yield from _unknown(cast(Mapping[str, Any], value), below, f"{prefix}{key}.")


def _suggest(key: str, tree: Tree) -> str:
    """The same word elsewhere in the tree (`lr` -> `trainer.lr`), else the closest among its siblings."""
    parent, _, word = key.rpartition(".")
    places = [(path, *path.rpartition(".")[::2]) for path in _paths(tree)]
    elsewhere = [path for path, _, name in places if name == word]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return did_you_mean(word, [name for _, above, name in places if above == parent], prefix=key.removesuffix(word))


def _paths(tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, below in tree.items():
        yield f"{prefix}{key}"
        if isinstance(below, dict):
            yield from _paths(below, f"{prefix}{key}.")
