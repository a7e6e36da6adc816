"""Every model refuses wrong arguments when it is constructed."""

from __future__ import annotations

import copy
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from cmab_models import CMANP
from cmab_models.systems import SYSTEMS
from safetensors.torch import load_file, save_file

from .cases import SIZES, made

WRONG = {
    "int": (10**30, 0, -1, 2.5, True, "wide", [8], float("nan")),
    "int | None": (10**30, 0, True, "wide"),
    "float": (float("nan"), float("inf"), -(10**400), True, "long", None),
    "bool": (1, "no", None),
    "str": (1, ["fixed"], None),
}
"""Values that an argument of this annotation must not have."""

LEAST = {"dim": 8, "num_heads": 2}
"""Arguments that are not 1 in the smallest model, which has no defaults for them."""


def arguments(system: str) -> dict[str, inspect.Parameter]:
    _, *parameters = inspect.signature(SYSTEMS[system].__init__).parameters.values()
    return {each.name: each for each in parameters}


def least(system: str) -> dict[str, Any]:
    """The arguments that a model needs, as small as they may be."""
    given = {name: 1 for name, each in arguments(system).items() if each.default is inspect.Parameter.empty}
    return given | {name: value for name, value in LEAST.items() if name in arguments(system)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_argument_is_checked(system: str) -> None:
    for name, each in arguments(system).items():
        for value in WRONG[each.annotation]:
            with pytest.raises(ValueError, match=rf"^{name}: got .*, expected (an? |True or False)"):
                SYSTEMS[system](**(least(system) | {name: value}))


@pytest.mark.parametrize("system", [each for each in SYSTEMS if "num_heads" in arguments(each)])
def test_heads_divide_the_width(system: str) -> None:
    with pytest.raises(ValueError, match=r"^num_heads: got 3, expected a divisor of dim = 8"):
        SYSTEMS[system](**(least(system) | {"num_heads": 3}))


@pytest.mark.parametrize("system", ["cmhp", "thp"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 5, "num_heads": 1}, "^dim: got 5, expected an even number"),
        ({"period": 0.0}, "^period: got 0.0, expected a number > 0"),
        ({"log_gap_std": -1.0}, "^log_gap_std: got -1.0, expected a number > 0"),
    ],
)
def test_numbers_of_a_point_process(system: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SYSTEMS[system](**(least(system) | changes))


def test_arguments_by_place_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"^dim: got 0, expected "):
        SYSTEMS["cnp"](1, 1, 0)
    with pytest.raises(TypeError, match="dim_y"):
        SYSTEMS["cnp"](1)
    assert copy.deepcopy(SYSTEMS["cnp"](1, 1, 4)).dim_x == 1


@pytest.mark.parametrize("system", ["cmanp", "cmanp-and", "lbanp"])
def test_a_folder_of_an_older_version_gives_what_it_gave(system: str, tmp_path: Path) -> None:
    """The saved configuration has no `residual`, because each layer added its result to its input."""
    saved = SYSTEMS[system](**least(system), residual="input")
    saved.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("residual") == "input"
    file.write_text(json.dumps(config))
    points = torch.randn(3, 2, 4, 1)
    ours, right = (model(*points).mean for model in (SYSTEMS[system].from_pretrained(tmp_path), saved))
    assert torch.equal(ours, right)


def test_a_folder_that_holds_another_model_or_a_part_of_one_is_refused(tmp_path: Path) -> None:
    """Missing weights would silently stay random."""
    SYSTEMS["cmanp"](**least("cmanp")).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"architectures: got \['CMANP'\], expected \['LBANP'\]; strict=False loads"):
        SYSTEMS["lbanp"].from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(dict(list(load_file(file).items())[:5]), file)
    with pytest.raises(RuntimeError, match=r"safetensors: got no .*, expected all parameters; strict=False loads it"):
        SYSTEMS["cmanp"].from_pretrained(tmp_path)
    SYSTEMS["cmanp"].from_pretrained(tmp_path, strict=False)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_class_loads_the_folder_of_another(system: str, tmp_path: Path) -> None:
    """Some have the same arguments, and parameters of the same names."""
    made(system).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [SYSTEMS[system].__name__]
    for other in {*SYSTEMS.values()} - {SYSTEMS[system]}:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            other.from_pretrained(tmp_path)


def test_every_parameter_is_in_the_file(tmp_path: Path) -> None:
    """Layers that take the weights of torch's can do without a parameter that torch's lack."""
    made("intention").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    save_file({name: each for name, each in held.items() if not name.endswith("log_alpha")}, file)
    with pytest.raises(RuntimeError, match=r"got no .*log_alpha, expected all parameters"):
        SYSTEMS["intention"].from_pretrained(tmp_path)
    loaded = SYSTEMS["intention"].from_pretrained(tmp_path, strict=False)
    assert loaded.state_dict().keys() == held.keys()


@pytest.mark.parametrize("text", ["[]", "null", "3", '"cmanp"'])
def test_a_configuration_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    SYSTEMS["cnp"](**least("cnp")).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: got .*, expected a JSON object"):
        SYSTEMS["cnp"].from_pretrained(tmp_path)


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_option_that_is_missing_or_misspelt_is_named(system: str) -> None:
    given, kind = least(system), SYSTEMS[system]
    first, known = next(iter(given)), ", ".join(arguments(system))
    unknown = f"got an unknown argument of {kind.__name__}, expected one of {known}"
    with pytest.raises(TypeError, match=rf"^{first}s: {unknown}; did you mean {first}\?$"):
        kind(**{name: value for name, value in given.items() if name != first}, **{f"{first}s": given[first]})
    with pytest.raises(TypeError, match=f"^xyz: {unknown}$"):
        kind(**given, xyz=1)
    last = next(name for name, each in arguments(system).items() if each.default is inspect.Parameter.empty)
    with pytest.raises(TypeError, match=rf"^{last}: got nothing, expected a value, as {kind.__name__} takes {known}$"):
        kind(**{name: value for name, value in given.items() if name != last})


class Refused(Exception):
    """An error of an HTTP library without a network."""


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let every request to the Hub fail, and return the requests."""
    asked: list[Any] = []

    def refuse(*question: Any, **_: Any) -> None:
        asked.append(question)
        raise Refused

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", refuse)
    return asked


@pytest.mark.parametrize(
    "place", ["./no/such/folder", "no/such/folder", "/no/such", "cmanp", "~/cmanp", "../cmanp", Path("of/mine")]
)
def test_a_folder_that_does_not_exist_is_named_at_once(place: str | Path, no_network: list[Any]) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"got {str(place)!r}, not a folder here, expected")):
        SYSTEMS["cmanp"].from_pretrained(place)
    assert not no_network


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}])
def test_the_hub_is_asked_once(options: dict[str, Any], no_network: list[Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got 'of/nobody', expected"):
        SYSTEMS["cmanp"].from_pretrained("of/nobody", cache_dir=tmp_path, **options)
    assert len(no_network) == (0 if options else 1)


def test_without_a_network_the_cache_of_the_hub_is_read(
    no_network: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--of--mine" / "snapshots" / ("0" * 40)
    saved = SYSTEMS["cnp"](**least("cnp"))
    saved.save_pretrained(snapshot)
    refs = tmp_path / "models--of--mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", huggingface_hub.hf_hub_download)
    loaded = SYSTEMS["cnp"].from_pretrained("of/mine", cache_dir=tmp_path)
    assert len(no_network) == 1
    for mine, other in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    kind = SYSTEMS["cnp"]
    with pytest.raises(FileNotFoundError, match=r"a folder without model\.safetensors and config\.json"):
        kind.from_pretrained(tmp_path)
    kind(**least("cnp")).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json', a file, not a folder"):
        kind.from_pretrained(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"a folder without config\.json"):
        kind.from_pretrained(tmp_path)
    assert kind.from_pretrained(tmp_path, **least("cnp")).dim_x == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_comes_back_in_its_dtype(system: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = made(system).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for before, after in zip(
        [*model.parameters(), *model.buffers()], [*loaded.parameters(), *loaded.buffers()], strict=True
    ):
        assert before.dtype == after.dtype and torch.equal(before, after)


@pytest.mark.parametrize("system", SYSTEMS)
def test_sizes_of_numpys_are_saved(system: str, tmp_path: Path) -> None:
    """NumPy integers are saved. Otherwise the loaded model would have the default sizes."""
    made(system, **{name: np.int64(SIZES[name]) for name in arguments(system) if name in SIZES}).save_pretrained(
        tmp_path / "numpy"
    )
    made(system).save_pretrained(tmp_path / "plain")
    configs = [json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("numpy", "plain")]
    assert configs[0] == configs[1]


class Derived(CMANP):
    def __init__(self, width: int = 8) -> None:
        super().__init__(dim_x=1, dim_y=2, dim=width, num_latents=4, num_heads=2, depth=1)


def test_a_derived_class_has_arguments_of_its_own(tmp_path: Path) -> None:
    Derived(16).save_pretrained(tmp_path)
    assert Derived.from_pretrained(tmp_path).latents.shape == (4, 16)


@dataclass
class Sizes:
    width: int = 8


class Configured(CMANP):
    def __init__(self, config: Sizes) -> None:
        super().__init__(dim_x=1, dim_y=2, dim=config.width, num_latents=4, num_heads=2, depth=1)


def test_a_derived_class_has_a_configuration_of_its_own(tmp_path: Path) -> None:
    Configured(Sizes(16)).save_pretrained(tmp_path)
    assert Configured.from_pretrained(tmp_path, config=Sizes(16)).latents.shape == (4, 16)


def test_norms_that_are_kept_in_float32(tmp_path: Path) -> None:
    model = made("cmanp").bfloat16()
    norm = next(part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)).float()
    norm.weight.data.fill_(1.001)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for before, after in zip(model.parameters(), loaded.parameters(), strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_tied_stay_tied(dtype: torch.dtype, tmp_path: Path) -> None:
    model = made("cmanp").to(dtype)
    first, second = model.blocks.blocks[0], model.blocks.blocks[1]
    first.latents, second.retrieve = second.latents, first.compress
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, before in model.state_dict().items():
        assert torch.equal(before, loaded.state_dict()[name]), name
    assert len([*loaded.parameters()]) == len([*model.parameters()])
    assert loaded.blocks.blocks[0].latents is loaded.blocks.blocks[1].latents
