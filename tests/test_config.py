"""The configuration: defaults, strict keys, types and ranges, overrides, shipped files."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources

import pytest
import yaml

from cpflare.arguments import describe_keys, described_keys, keys_page
from cpflare.config import Config, config_from_dict, load_config, option_owners, parse_bytes
from cpflare.errors import ConfigError
from cpflare.models.mixers import MIXERS
from support.paths import ROOT

SHIPPED = sorted(
    path.name
    for path in resources.files("cpflare.configs").iterdir()
    if path.name.endswith(".yaml")
)


def test_the_defaults_are_the_published_full_surface_setting():
    config = load_config()
    assert (config.model.channels, config.model.heads) == (128, 8)
    assert config.model.latents in (32, 64, 128)
    assert config.model.blocks in (2, 4, 8, 12, 16, 20)
    assert config.model.ffn_ratio == 2.0
    assert config.model.gate_init == 0.25
    assert (config.model.query, config.model.synthesis) == ("gated", "shared")
    assert (config.train.lr, config.train.weight_decay) == (1e-3, 1e-4)
    assert (config.train.epochs, config.train.schedule) == (500, "onecycle")
    assert config.data.tokens == 100_000
    assert (config.input_channels, config.target_channels) == (6, 4)


@pytest.mark.parametrize(
    ("precision", "norm"),
    [("fp32", "layernorm"), ("fp64", "layernorm"), ("bf16", "rmsnorm"), ("fp16", "rmsnorm")],
)
def test_the_norm_follows_the_precision_unless_it_is_set(precision, norm):
    values = {"train": {"precision": precision}}
    assert config_from_dict(values).model.norm == norm
    for chosen in ("layernorm", "rmsnorm"):
        assert config_from_dict(values | {"model": {"norm": chosen}}).model.norm == chosen


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("model.latent=3", r"model\.latents"),
        ("modle.latents=3", r"model(\.latents)?"),
        ("trian.lr=3", r"train(\.lr)?"),
        ("train.warm_up=0.2", r"train\.warmup"),
        ("lr=0.1", r"train\.lr"),
        ("parallel.cp_=2", r"parallel\.cp"),
        ("data.token=5", r"data\.tokens"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(override, nearest):
    section = override.split("=")[0].split(".")[0]
    text = rf"unknown config key '{section}\S*'; did you mean {nearest}\?"
    with pytest.raises(ConfigError, match=text) as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "model.channels=many",
        "model.channels=1.5",
        "model.channels=true",
        "model.channels=null",
        "model.channels=[1]",
        "model.mixer=flare+",
        "model.query=Gated",
        "model.ffn_ratio=wide",
        "data.tokens=everything",
        "data.tokens=true",
        "data.inputs=position",
        "data.inputs=[1,2]",
        "data.train_split=3",
        "data.store=12",
        "train.deterministic=1",
        "train.deterministic=maybe",
        "train.precision=fp8",
        "train.steps=ten",
        "train.lr=abc",
        "model=flare",
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_key_and_value(override):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"^{key}=.* must be ") as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)
    assert value.strip("[]").split(",")[0].lower() in str(caught.value).lower().replace(
        "none", "null"
    )


@pytest.mark.parametrize(
    "override",
    [
        "model.channels=0",
        "model.heads=-1",
        "model.blocks=0",
        "model.latents=0",
        "model.ffn_ratio=0",
        "model.dropout=1",
        "model.dropout=-0.1",
        "data.tokens=0",
        "data.tokens=-5",
        "data.inputs=[]",
        "data.inputs=[position,position]",
        "data.inputs=[pressure]",
        "data.targets=[normal]",
        "parallel.cp=0",
        "parallel.dp=-2",
        "parallel.timeout_s=0",
        "train.steps=0",
        "train.epochs=0",
        "train.cases_per_step=0",
        "train.lr=0",
        "train.lr=-1e-3",
        "train.lr=.nan",
        "train.weight_decay=-1",
        "train.clip=-1",
        "train.warmup=1",
        "train.ema=1",
        "train.keep=0",
        "train.seed=-1",
        "train.eval_tokens=0",
        "train.checkpoint_every=-1",
    ],
)
def test_a_value_out_of_range_is_refused_by_key(override):
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=.* must be ") as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)


def test_heads_must_divide_the_channels_and_the_mend_does():
    with pytest.raises(ConfigError, match=r"model.channels=100 .* model.heads=8") as caught:
        load_config(None, ["model.channels=100"])
    mend = str(caught.value).split("for example ")[1]
    assert load_config(None, [mend]).model.channels == 104


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"recompute": 2}, r"engine.recompute=2 .*set engine.executor=streamed"),
        ({"executor": "streamed", "recompute": 0}, r"engine.recompute=0 .*k of at least 1"),
        ({"executor": "streamed", "recompute": "pointwise"}, r"leave it out"),
        ({"offload": "host"}, r"engine.offload=host .*set engine.executor=streamed"),
        ({"offload": "bf16"}, r"engine.offload=bf16 .*set engine.executor=streamed"),
        ({"chunk_tokens": 0}, r"engine.chunk_tokens=0 must be positive"),
        ({"memory_limit": "6 gigs"}, r"engine.memory_limit=6 gigs must be bytes or a size"),
    ],
    ids=str,
)
def test_keys_that_do_not_go_together_are_refused(engine, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"engine": engine})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, None), (4096, 4096), ("4096", 4096), ("6GiB", 6 * 2**30), ("1.5 GB", 1_500_000_000),
        (" 512MiB ", 512 * 2**20), ("3KB", 3000), ("0.5KiB", 512), ("10B", 10),
    ],
)  # fmt: skip
def test_sizes_are_read_with_their_units(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "6Gib", "6 G", "-1GiB", "1e9", "1.2.3GiB", "."])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(ConfigError, match="must be bytes or a size such as 6GiB"):
        parse_bytes(text)


def test_the_registry_says_which_mixers_there_are(monkeypatch):
    known = re.escape(" | ".join(MIXERS))
    with pytest.raises(ConfigError, match=rf"^model.mixer='mine' must be {known}$"):
        load_config(None, ["model.mixer=mine"])
    monkeypatch.setitem(MIXERS, "mine", MIXERS["flare"])
    assert load_config(None, ["model.mixer=mine"]).model.mixer == "mine"
    assert "| mine" in describe_keys()
    with pytest.raises(ConfigError, match=r"\| mine; did you mean mine\?$"):
        load_config(None, ["model.mixer=mime"])


@pytest.mark.slow
def test_the_page_on_the_keys_is_what_they_say_of_themselves():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == keys_page() + "\n", "python -m cpflare.arguments > docs/config.md"
    keys = {f"{part}.{name}" for part, names in Config().to_dict().items() for name in names}
    keys |= {f"model.{name}" for name in option_owners()}
    assert {key for key, *_ in described_keys()} == keys
    for key, default, values, about in described_keys():
        assert f"\n  {key}={default} " in describe_keys()
        assert f"{values}\n      {about}" in describe_keys()


def test_an_option_belongs_to_its_mixer():
    assert load_config(None, ["model.query=pure"]).model.query == "pure"
    with pytest.raises(ConfigError, match=r"model\.query=pure is an option of .*, not of flare;"):
        load_config(None, ["model.mixer=flare", "model.query=pure"])
    # At its default it says nothing, and configurations of earlier versions have it.
    config = load_config(None, ["model.mixer=flare", "model.query=gated"])
    assert "query" not in config.to_dict()["model"]
    with pytest.raises(ConfigError, match=r"model\.qerry.*did you mean model\.query\?"):
        load_config(None, ["model.qerry=pure"])


def test_a_file_and_overrides_the_last_of_which_wins(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "model: {mixer: flare, blocks: 3}\ntrain: {lr: 2.0e-3}\ndata: {train_split: test}\n"
    )
    overrides = ["model.blocks=4", "train.steps=20", "model.blocks=5", "data.tokens=all"]
    config = load_config(path, overrides)
    assert (config.model.mixer, config.model.blocks) == ("flare", 5)
    assert (config.train.lr, config.train.steps) == (2e-3, 20)
    assert config.data.tokens == "all"
    assert config.data.train_split == "test"
    listed = load_config(path, ["data.train_split=[run_1, run_2]", "train.steps=null"])
    assert listed.data.train_split == ["run_1", "run_2"]
    assert listed.train.steps is None


@pytest.mark.parametrize(
    ("override", "value"),
    [("train.lr=1e-3", 1e-3), ("train.lr=1", 1.0), ("model.ffn_ratio=4", 4.0)],
)
def test_numbers_may_be_written_any_way(override, value):
    config = load_config(None, [override])
    section, name = override.split("=")[0].split(".")
    found = getattr(getattr(config, section), name)
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize("override", ["train.lr", "=3", "train.lr 3"])
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(ConfigError, match="is not key=value"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("- a\n- b\n", "is a list"),
        ("model: [1, 2\n", "mine.yaml"),
        ("model:\n  channels: ${nowhere.at.all}\n", "nowhere"),
        ("3\n", "mine.yaml"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path, text, match):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_absent_is_refused_with_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"elsewhere/quickstart\.yaml does not exist"):
        load_config("elsewhere/quickstart.yaml")


def test_what_the_design_names_is_shipped():
    assert {"quickstart.yaml", "drivaerml_flare.yaml", "drivaerml_flarepp.yaml"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_loads_by_any_of_its_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert config == load_config(name.removesuffix(".yaml")) == load_config(f"configs/{name}")
    assert config != Config()


def test_the_resolved_configuration_survives_its_file(tmp_path):
    from omegaconf import OmegaConf

    overrides = ["train.precision=bf16", "model.mixer=flare", "data.train_split=[run_1]"]
    config = load_config(None, overrides)
    assert config_from_dict(config.to_dict()) == config
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.create(config.to_dict()), path)
    assert load_config(path) == config


def test_every_section_is_frozen():
    config = load_config()
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, getattr(part, name))


@pytest.mark.parametrize("override", ["run.dir=1e5", "data.train_split=[1e5,8]", "data.store=12"])
def test_a_name_that_yaml_reads_as_a_number_is_mended_by_quotes(override):
    with pytest.raises(ConfigError, match="quotes mend it") as caught:
        load_config(None, [override])
    mended = re.search(r"as in '(.*)'", str(caught.value))[1]
    key, _, value = mended.partition("=")
    section, _, name = key.partition(".")
    found = getattr(getattr(load_config(None, [mended]), section), name)
    assert found == (["1e5"] if value.startswith("[") else "1e5")


def test_a_runs_own_file_is_a_configuration(tmp_path):
    config = load_config(None, ["model.blocks=3"])
    content = {**config.to_dict(), "dataset": {"normalizer": {}, "train_cases": {"run_1": None}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert load_config(tmp_path / "config.yaml") == config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"dataset": {"other": 1}}))
    with pytest.raises(ConfigError, match="unknown config key 'dataset"):
        load_config(tmp_path / "config.yaml")
