"""Which family a directory is of, and in which of its formats it is.

    spec = spec_of(catalog, None)                 # as config.json says
    detect_format(catalog, spec)                  # "transformers"

A family that is named and another one in `config.json` are an error: rules of the wrong family
would cut tensors at the wrong places, and a comparison by the same rules would not see it.
"""

from collections import Counter

from weight_convert.errors import UnknownFamilyError, WeightConvertError
from weight_convert.files import Catalog
from weight_convert.specs import FamilySpec, Format, Matcher, Side, get_spec


def spec_of(catalog: Catalog, spec: FamilySpec | None) -> FamilySpec:
    """The family of a directory: `spec`, or what its `config.json` names.

    Raises:
        WeightConvertError: `config.json` names another family than `spec`.
        UnknownFamilyError: no spec is given and `config.json` names no known family.
    """
    named = catalog.config.get("model_type")
    if spec is None:
        if not isinstance(named, str):
            raise UnknownFamilyError(
                f"{catalog.directory / 'config.json'} names no model_type; name the family "
                f'yourself (spec=get_spec("..."), or --model-type on the command line)'
            )
        return get_spec(named)
    if named is not None and named != spec.model_type:
        raise WeightConvertError(
            f"the family {spec.model_type!r} was asked for, but {catalog.directory}/config.json is "
            f"of model_type {named!r}; leave the family out, or correct config.json"
        )
    return spec


def detect_format(catalog: Catalog, spec: FamilySpec) -> str:
    """The format whose rules name most of a directory's tensors; `fused` where none does.

    Shapes tell matrices that are transposed under another format's names. Where they do not, as all
    are square, files are taken for what they are by their kind: Paddle's where they are
    `.pdparams`, not transposed where they are others. Name the format of such files yourself.
    """
    counts: Counter[str] = Counter({"fused": 0})
    skeletons = Matcher.skeletons(catalog.tensors)
    for name, form in spec.formats.items():
        more = _more_turned(catalog, spec, form)
        if more < 0:
            continue
        is_turned = more > 0 or form.files == catalog.kind == "pdparams"
        telling = [
            rule for rule in form.rules if not rule.is_itself or (rule.transposed and is_turned)
        ]
        matcher = Matcher([rule.source for rule in telling], spec.companions)
        found = (number for key, number in skeletons.items() if matcher.find(key) is not None)
        counts[name] += sum(found)
    return counts.most_common(1)[0][0]


def _more_turned(catalog: Catalog, spec: FamilySpec, form: Format) -> int:
    """Of the matrices that a format transposes and does not rename: how many more stand transposed.

    A dim of one name has one size in all tensors, so those that are not transposed tell it.
    """
    turned = Matcher([rule.source for rule in form.rules if rule.transposed and rule.is_itself])
    if not turned.sides:
        return 0
    names = list(spec.tensors)
    matcher = Matcher([Side(names=(name,), groups=()) for name in names])
    sizes: dict[str, int] = {}
    matrices: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    for key, tensor in catalog.tensors.items():
        member = matcher.find(key)
        dims = () if member is None else spec.tensors[names[member.side]].dims
        if member is None or len(dims) != len(tensor.shape):
            continue
        if turned.find(key) is not None:
            matrices.append((dims, tensor.shape))
        else:
            sizes |= {dim: n for dim, n in zip(dims, tensor.shape, strict=True) if dim not in sizes}

    def fits(dims: tuple[str, ...], shape: tuple[int, ...]) -> bool:
        return all(sizes.get(dim, n) == n for dim, n in zip(dims, shape, strict=True))

    turns = sum(fits((*outer, cols, rows), shape) for (*outer, rows, cols), shape in matrices)
    return turns - sum(fits(dims, shape) for dims, shape in matrices)


def stored_roles(catalog: Catalog, spec: FamilySpec) -> dict[str, tuple[str, str]]:
    """Role and template in memory of each stored tensor that the spec names; companions are not."""
    rules = spec.format(detect_format(catalog, spec)).rules
    stored = Matcher([rule.source for rule in rules])
    names = list(spec.tensors)
    known = Matcher([Side(names=(name,), groups=()) for name in names])
    found: dict[str, tuple[str, str]] = {}
    for key in catalog.tensors:
        member = stored.find(key)
        if member is not None:
            name = rules[member.side].target.names[0]
        else:
            itself = known.find(key)
            name = names[itself.side] if itself is not None else ""
        if name in spec.tensors:
            found[key] = spec.tensors[name].role, name
    return found
