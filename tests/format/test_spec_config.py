"""ModelSpec and how the architectures make it from config.json: right for what is published, refused for the rest.

Configurations come from tests/support (the tiny ones and the real 35B's), which do not know Mosaic.
"""

import copy
import json
from pathlib import Path

import pytest

from mosaic.format import architectures
from mosaic.format.errors import InputError
from mosaic.format.spec import FeedForward, Mixer, ModelSpec
from support.listing import load_listing
from support.tiny import Tiny, config

FAMILIES = ("qwen3_5_moe", "qwen3_next", "qwen3_moe")
NOT_REFUSED = pytest.fail.Exception  # what pytest.raises raises when nothing was
FILE = Path("/somewhere/config.json")


def parse(values):
    return architectures.find(values, FILE).parse(values, FILE)


def text(values):
    return values.get("text_config", values)


def changed(family, **fields):
    """The config of a family with some text fields replaced."""
    values = copy.deepcopy(config(Tiny(family)))
    text(values).update(fields)
    return values


def without(family, *keys):
    values = copy.deepcopy(config(Tiny(family)))
    for key in keys:
        text(values).pop(key)
    return values


class TestModelSpec:
    def specs(self):
        tiny = [parse(config(Tiny(family))) for family in FAMILIES]
        dense = parse(config(Tiny("qwen3_moe", mlp_only_layers=(1,))))
        return [*tiny, dense, *(parse(load_listing(variant)[0]) for variant in ("3.5", "3.6"))]

    def test_json_round_trip(self):
        for spec in self.specs():
            assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec

    def test_json_holds_plain_values(self):
        value = json.loads(json.dumps(parse(config(Tiny())).to_json()))
        assert value["layers"][3] == {"mixer": "full_attention", "feed_forward": "moe"}
        assert value["moe"]["num_experts"] == 16
        assert value["dense_intermediate_size"] is None

    @pytest.fixture
    def value(self):
        return json.loads(json.dumps(parse(config(Tiny())).to_json()))

    @pytest.mark.parametrize("section", [(), ("attention",), ("gated_delta",), ("moe",), ("layers", 0)], ids=str)
    def test_an_unknown_and_a_missing_key(self, value, section):
        part = value
        for step in section:
            part = part[step]
        for key in list(part):
            kept = part.pop(key)
            with pytest.raises(ValueError, match="expected an object with the keys"):
                ModelSpec.from_json(value)
            part[key] = kept
        assert ModelSpec.from_json(value)
        part["extra"] = 1
        with pytest.raises(ValueError, match="extra"):
            ModelSpec.from_json(value)

    @pytest.mark.parametrize(
        ("path", "wrong"),
        [
            ("hidden_size", "256"),
            ("hidden_size", 256.0),
            ("hidden_size", True),
            ("hidden_size", None),
            ("rms_norm_eps", "1e-6"),
            ("rms_norm_eps", None),
            ("rms_norm_eps", True),
            ("model_type", 5),
            ("model_type", None),
            ("tie_embeddings", 1),
            ("tie_embeddings", "false"),
            ("layers", None),
            ("layers", {}),
            ("layers", "moe"),
            ("layers", [None]),
            ("layers", [{"mixer": 1, "feed_forward": "moe"}]),
            ("layers", [{"mixer": "full_attention", "feed_forward": None}]),
            ("attention", None),
            ("attention", []),
            ("gated_delta", 5),
            ("gated_delta", {}),
            ("moe", "16"),
            ("dense_intermediate_size", "1"),
            ("dense_intermediate_size", False),
        ],
        ids=str,
    )
    def test_a_wrong_type_is_named(self, value, path, wrong):
        value[path] = wrong
        with pytest.raises(ValueError) as refusal:
            ModelSpec.from_json(value)
        assert f"spec.{path}" in str(refusal.value)

    def test_an_unknown_kind_of_layer(self, value):
        value["layers"][1]["mixer"] = "mamba"
        with pytest.raises(ValueError, match="mamba"):
            ModelSpec.from_json(value)

    @pytest.mark.parametrize("value", [None, 5, "x", [], {}, [[]]], ids=str)
    def test_no_spec_at_all(self, value):
        with pytest.raises(ValueError, match="spec"):
            ModelSpec.from_json(value)


class TestPublished:
    @pytest.mark.parametrize("variant", ["3.5", "3.6"])
    def test_the_35b(self, variant):
        """MODEL-SPEC 1.1, number by number."""
        spec = parse(load_listing(variant)[0])
        assert (spec.model_type, spec.hidden_size, spec.vocab_size) == ("qwen3_5_moe", 2048, 248320)
        assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.norm_offset) == (262144, 1e-6, 1.0)
        assert spec.tie_embeddings is False
        mixers = [layer.mixer for layer in spec.layers]
        assert mixers == ([Mixer.LINEAR_ATTENTION] * 3 + [Mixer.FULL_ATTENTION]) * 10
        assert {layer.feed_forward for layer in spec.layers} == {FeedForward.MOE}
        attention, delta, moe = spec.attention, spec.gated_delta, spec.moe
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 2, 256)
        assert (attention.rotary_dim, attention.rope_theta, attention.gated) == (64, 1e7, True)
        assert (delta.num_key_heads, delta.num_value_heads, delta.key_head_dim, delta.value_head_dim) == (
            16,
            32,
            128,
            128,
        )
        assert (delta.conv_kernel, delta.grouped) == (4, False)
        assert (delta.key_dim, delta.value_dim, delta.conv_dim) == (2048, 4096, 8192)
        assert (moe.num_experts, moe.top_k, moe.intermediate_size, moe.shared_intermediate_size) == (256, 8, 512, 512)
        assert moe.normalize_top_k is True
        assert spec.dense_intermediate_size is None

    def test_qwen3_next(self):
        spec = parse(config(Tiny("qwen3_next", norm_topk_prob=False, mlp_only_layers=(1,))))
        assert (spec.model_type, spec.norm_offset, spec.dense_intermediate_size) == ("qwen3_next", 1.0, 256)
        assert [layer.mixer for layer in spec.layers] == [Mixer.LINEAR_ATTENTION] * 3 + [Mixer.FULL_ATTENTION]
        assert [layer.feed_forward.value for layer in spec.layers] == ["moe", "dense", "moe", "moe"]
        assert spec.gated_delta.grouped is True
        assert spec.attention.gated is True
        assert spec.attention.rotary_dim == 16
        assert spec.moe.normalize_top_k is False
        assert spec.moe.shared_intermediate_size == 128

    def test_qwen3_moe(self):
        spec = parse(config(Tiny("qwen3_moe")))
        assert (spec.model_type, spec.norm_offset, spec.gated_delta) == ("qwen3_moe", 0.0, None)
        assert {layer.mixer for layer in spec.layers} == {Mixer.FULL_ATTENTION}
        assert (spec.attention.gated, spec.attention.rotary_dim, spec.attention.rope_theta) == (False, 64, 1e6)
        assert spec.moe.shared_intermediate_size == 0
        assert spec.dense_intermediate_size is None

    def test_a_flat_text_config_is_the_nested_one(self):
        nested = config(Tiny())
        flat = {**nested["text_config"], "model_type": "qwen3_5_moe_text"}
        assert parse(flat) == parse(nested)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_rope_in_both_forms(self, family):
        """The older flat keys and rope_parameters say the same."""
        values = config(Tiny(family))
        expected = parse(values)
        fields = text(values)
        if "rope_parameters" in fields:
            rope = fields.pop("rope_parameters")
            fields["rope_theta"] = rope["rope_theta"]
        else:
            rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
            if "partial_rotary_factor" in fields:
                rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
            fields["rope_parameters"] = rope
        assert parse(values) == expected

    def test_rope_parameters_win_over_the_flat_keys(self):
        values = changed("qwen3_5_moe", rope_theta=5.0, partial_rotary_factor=1.0)
        assert parse(values) == parse(config(Tiny()))


class TestDefaults:
    """MODEL-SPEC 1.4: what an absent key means."""

    @pytest.mark.parametrize(("family", "rotary"), [("qwen3_5_moe", 16), ("qwen3_next", 16), ("qwen3_moe", 64)])
    def test_partial_rotary_factor(self, family, rotary):
        values = changed(family, head_dim=64)
        text(values).pop("partial_rotary_factor", None)
        text(values).get("rope_parameters", {}).pop("partial_rotary_factor", None)
        assert parse(values).attention.rotary_dim == rotary

    @pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
    def test_layer_types_from_the_interval(self, family):
        values = changed(family, num_hidden_layers=7, full_attention_interval=3)
        text(values).pop("layer_types", None)
        full = [layer.mixer is Mixer.FULL_ATTENTION for layer in parse(values).layers]
        assert full == [False, False, True, False, False, True, False]
        text(values).pop("full_attention_interval")
        full = [layer.mixer is Mixer.FULL_ATTENTION for layer in parse(values).layers]
        assert full == [False, False, False, True, False, False, False]

    def test_layer_types_win_over_the_interval(self):
        kinds = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
        values = changed("qwen3_5_moe", layer_types=kinds)
        assert [layer.mixer.value for layer in parse(values).layers] == kinds

    @pytest.mark.parametrize(("family", "default"), [("qwen3_next", True), ("qwen3_moe", False)])
    def test_norm_topk_prob(self, family, default):
        """The defaults of the transformers classes, which is what an absent key means to everybody else."""
        assert parse(without(family, "norm_topk_prob")).moe.normalize_top_k is default
        for stated in (True, False):
            assert parse(changed(family, norm_topk_prob=stated)).moe.normalize_top_k is stated

    def test_qwen3_5_always_renormalises(self):
        assert parse(changed("qwen3_5_moe", norm_topk_prob=False)).moe.normalize_top_k is True

    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
    def test_every_layer_is_moe(self, family):
        spec = parse(without(family, "mlp_only_layers", "decoder_sparse_step", "intermediate_size"))
        assert {layer.feed_forward for layer in spec.layers} == {FeedForward.MOE}

    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
    def test_decoder_sparse_step(self, family):
        spec = parse(changed(family, decoder_sparse_step=2, mlp_only_layers=[3]))
        assert [layer.feed_forward.value for layer in spec.layers] == ["dense", "moe", "dense", "dense"]
        assert spec.dense_intermediate_size == 256

    @pytest.mark.parametrize("family", FAMILIES)
    def test_untied(self, family):
        values = without(family, "tie_word_embeddings")
        values.pop("tie_word_embeddings", None)
        assert parse(values).tie_embeddings is False

    def test_tied_at_the_top_of_a_nested_config(self):
        values = without("qwen3_5_moe", "tie_word_embeddings")
        values["tie_word_embeddings"] = True
        assert parse(values).tie_embeddings is True

    @pytest.mark.parametrize(
        ("family", "key"),
        [
            *((family, key) for family in FAMILIES for key in ("attention_bias", "output_gate_type", "torch_dtype")),
            *((family, key) for family in FAMILIES for key in ("hidden_act", "use_sliding_window", "rope_scaling")),
            ("qwen3_5_moe", "attn_output_gate"),
            ("qwen3_5_moe", "mtp_use_dedicated_embeddings"),
        ],
    )
    def test_never_required(self, family, key):
        values = copy.deepcopy(config(Tiny(family)))
        text(values).pop(key, None)
        assert parse(values) == parse(config(Tiny(family)))

    @pytest.mark.parametrize("gate", ["silu", "swish", None])
    def test_gates_that_are_the_same(self, gate):
        assert parse(changed("qwen3_5_moe", output_gate_type=gate)) == parse(config(Tiny()))


INTEGERS = {
    "hidden_size": FAMILIES,
    "vocab_size": FAMILIES,
    "max_position_embeddings": FAMILIES,
    "num_hidden_layers": FAMILIES,
    "num_attention_heads": FAMILIES,
    "num_key_value_heads": FAMILIES,
    "head_dim": FAMILIES,
    "num_experts": FAMILIES,
    "num_experts_per_tok": FAMILIES,
    "moe_intermediate_size": FAMILIES,
    "shared_expert_intermediate_size": FAMILIES[:2],
    "linear_num_key_heads": FAMILIES[:2],
    "linear_num_value_heads": FAMILIES[:2],
    "linear_key_head_dim": FAMILIES[:2],
    "linear_value_head_dim": FAMILIES[:2],
    "linear_conv_kernel_dim": FAMILIES[:2],
}


class TestRefusals:
    def refusal(self, values):
        with pytest.raises(InputError) as refusal:
            parse(values)
        assert refusal.value.facts["file"] == str(FILE)
        assert {"found", "expected", "remedy"} <= refusal.value.facts.keys()
        return refusal.value

    @pytest.mark.parametrize("kind", ["llama", "qwen3_5", "Qwen3_5_moe", "", None, 5, [], {}], ids=str)
    def test_unknown_model_type(self, kind):
        error = self.refusal({**config(Tiny()), "model_type": kind})
        assert repr(kind) in error.facts["found"]
        assert "qwen3_next" in error.facts["expected"]

    def test_no_model_type(self):
        self.refusal({"text_config": {}})

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attention_bias", True),
            ("hidden_act", "gelu"),
            ("hidden_act", None),
            ("use_sliding_window", True),
            ("output_gate_type", "sigmoid"),
            ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
            ("rope_scaling", {"type": "linear"}),
            ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
            ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e6}),
            ("rope_parameters", "default"),
            ("rope_parameters", {}),
            ("num_key_value_heads", 3),
            ("num_key_value_heads", 8),
            ("num_experts_per_tok", 17),
            ("partial_rotary_factor", 0.0),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", -1e-6),
            ("rms_norm_eps", "1e-6"),
            ("rms_norm_eps", True),
            ("rms_norm_eps", float("nan")),
            ("rms_norm_eps", float("inf")),
            ("tie_word_embeddings", "false"),
            ("tie_word_embeddings", 1),
        ],
        ids=str,
    )
    def test_what_would_compute_something_else(self, family, key, value):
        values = changed(family, **{key: value})
        if key == "partial_rotary_factor":
            text(values).pop("rope_parameters", None)
            text(values)["rope_theta"] = 1e6
        error = self.refusal(values)
        assert key.split("_")[0] in error.problem

    @pytest.mark.parametrize("family", FAMILIES)
    def test_rope_type_under_its_older_name(self, family):
        """transformers takes `type` where `rope_type` is absent."""
        self.refusal(changed(family, rope_parameters={"type": "yarn", "factor": 4.0, "rope_theta": 1e6}))

    @pytest.mark.parametrize(
        ("family", "key"), [(family, key) for key, families in INTEGERS.items() for family in families]
    )
    def test_integers(self, family, key):
        for wrong in ("4", 4.0, True, None, -4, 0, [4], {}):
            error = self.refusal(changed(family, **{key: wrong}))
            assert key in error.problem
            assert repr(wrong) in error.facts["found"] or wrong is None
        error = self.refusal(without(family, key))
        assert key in error.problem
        assert error.facts["found"] == "nothing"

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_missing_numbers(self, family, key):
        values = copy.deepcopy(config(Tiny(family)))
        (text(values).get("rope_parameters", {}) if key == "rope_theta" else {}).pop(key, None)
        text(values).pop(key, None)
        assert key in self.refusal(values).problem

    def test_value_heads_not_divisible(self):
        assert "linear_num_value_heads" in self.refusal(changed("qwen3_5_moe", linear_num_value_heads=6)).problem

    @pytest.mark.parametrize("factor", [1.5, 0.01, -0.25, "0.25", True, float("nan")], ids=str)
    def test_rotary_share(self, factor):
        values = changed("qwen3_5_moe")
        values["text_config"]["rope_parameters"]["partial_rotary_factor"] = factor
        assert "rope_parameters.partial_rotary_factor" in self.refusal(values).problem

    def test_an_odd_rotary_dim(self):
        values = changed("qwen3_5_moe", head_dim=20)
        assert "partial_rotary_factor" in self.refusal(values).problem

    @pytest.mark.parametrize(
        "kinds",
        [
            ["full_attention"] * 3,
            ["full_attention"] * 5,
            [],
            ["full_attention", "full_attention", "full_attention", "sliding_attention"],
            ["full_attention", "full_attention", "full_attention", 1],
            ["full_attention", "full_attention", "full_attention", None],
            "full_attention",
            {"0": "full_attention"},
            4,
        ],
        ids=str,
    )
    @pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
    def test_layer_types(self, family, kinds):
        assert "layer_types" in self.refusal(changed(family, layer_types=kinds)).problem

    @pytest.mark.parametrize("layers", ["1", 1, [1.0], ["1"], [True], [-1], {"1": 1}], ids=str)
    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
    def test_mlp_only_layers(self, family, layers):
        assert "mlp_only_layers" in self.refusal(changed(family, mlp_only_layers=layers)).problem

    @pytest.mark.parametrize("layers", [False, 0, "", {}], ids=repr)
    def test_mlp_only_layers_of_a_falsy_kind(self, layers):
        self.refusal(changed("qwen3_moe", mlp_only_layers=layers))

    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
    def test_dense_layers_need_their_size(self, family):
        values = changed(family, mlp_only_layers=[0])
        del values["intermediate_size"]
        assert "intermediate_size" in self.refusal(values).problem

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("mlp_only_layers", [1]),
            ("decoder_sparse_step", 2),
            ("attn_output_gate", False),
            ("mtp_use_dedicated_embeddings", True),
        ],
    )
    def test_what_this_family_never_has(self, key, value):
        assert key in self.refusal(changed("qwen3_5_moe", **{key: value})).problem

    @pytest.mark.parametrize("section", [None, [], "x", 5], ids=str)
    def test_a_text_config_that_is_none(self, section):
        assert "text_config" in self.refusal({**config(Tiny()), "text_config": section}).problem

    @pytest.mark.parametrize("key", ["norm_topk_prob"])
    @pytest.mark.parametrize("wrong", ["true", 1, 0, None], ids=repr)
    def test_flags(self, key, wrong):
        assert key in self.refusal(changed("qwen3_moe", **{key: wrong})).problem

    @pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers"])
    def test_more_than_the_index_can_number(self, key):
        self.refusal(changed("qwen3_moe", **{key: 65537}))
