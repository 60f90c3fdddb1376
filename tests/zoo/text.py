"""Models of text: decoders, encoders, encoder-decoders, mixtures of experts, and state-space models."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.zoo.entry import (
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    VOCABULARY,
    Entry,
    Inputs,
    hugging_face,
    language,
    padded_language,
)

WIDTH = dict(hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=VOCABULARY)
SIZES = dict(WIDTH, intermediate_size=FEED_FORWARD, max_position_embeddings=16)
GROUPED = dict(SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
OPENAI = dict(
    n_embd=HIDDEN, n_layer=1, n_head=HEADS, vocab_size=VOCABULARY, n_positions=16, bos_token_id=1, eos_token_id=2
)
SEQ2SEQ = dict(
    d_model=HIDDEN,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=FEED_FORWARD,
    decoder_ffn_dim=FEED_FORWARD,
    vocab_size=VOCABULARY,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
)
T5 = dict(
    d_model=HIDDEN,
    d_ff=FEED_FORWARD,
    num_layers=1,
    num_heads=HEADS,
    d_kv=8,
    vocab_size=VOCABULARY,
    decoder_start_token_id=0,
    pad_token_id=0,
)
EXPERTS = dict(GROUPED, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True)


def decoder(name: str, model: str, **sizes: object) -> Entry:
    return hugging_face(name, "text, decoder", model, language, **sizes)


def encoder(name: str, model: str, **sizes: object) -> Entry:
    return hugging_face(name, "text, encoder", model, padded_language, **sizes)


def both(name: str, model: str, **sizes: object) -> Entry:
    return hugging_face(name, "text, encoder and decoder", model, padded_language, **sizes)


def experts(name: str, model: str, inputs: Callable[[], Inputs] = language, **sizes: object) -> Entry:
    """Return an entry that runs in float32, the only dtype of the grouped product over experts."""
    return hugging_face(name, "text, experts", model, inputs, dtype=torch.float32, **sizes)


def recurrent(name: str, model: str, **sizes: object) -> Entry:
    return hugging_face(name, "text, state space", model, language, **sizes)


TEXT = [
    decoder("gpt2", "GPT2LMHeadModel", **OPENAI),
    decoder(
        "gpt_neo",
        "GPTNeoForCausalLM",
        hidden_size=HIDDEN,
        num_layers=2,
        num_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    decoder("gpt_neox", "GPTNeoXForCausalLM", **SIZES),
    decoder("gptj", "GPTJForCausalLM", **OPENAI, rotary_dim=4),
    decoder("codegen", "CodeGenForCausalLM", **OPENAI, rotary_dim=4),
    decoder(
        "opt",
        "OPTForCausalLM",
        **WIDTH,
        ffn_dim=FEED_FORWARD,
        max_position_embeddings=16,
        word_embed_proj_dim=HIDDEN,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    decoder("bloom", "BloomForCausalLM", hidden_size=HIDDEN, n_layer=1, n_head=HEADS, vocab_size=VOCABULARY),
    decoder("falcon", "FalconForCausalLM", **WIDTH, bos_token_id=1, eos_token_id=2, quick=True),
    decoder("mpt", "MptForCausalLM", d_model=HIDDEN, n_layers=1, n_heads=HEADS, vocab_size=VOCABULARY, max_seq_len=16),
    decoder("llama", "LlamaForCausalLM", **GROUPED),
    decoder("mistral", "MistralForCausalLM", **GROUPED, sliding_window=4),
    decoder("qwen2", "Qwen2ForCausalLM", **GROUPED),
    decoder("qwen3", "Qwen3ForCausalLM", **GROUPED, head_dim=8),
    decoder("gemma2", "Gemma2ForCausalLM", **GROUPED, head_dim=8, sliding_window=4),
    decoder("gemma3", "Gemma3ForCausalLM", **GROUPED, head_dim=8, sliding_window=4, config="Gemma3Text"),
    decoder("phi3", "Phi3ForCausalLM", **GROUPED),
    decoder("olmo2", "Olmo2ForCausalLM", **GROUPED),
    decoder("cohere", "CohereForCausalLM", **GROUPED),
    decoder("stablelm", "StableLmForCausalLM", **GROUPED),
    decoder("starcoder2", "Starcoder2ForCausalLM", **GROUPED),
    encoder("bert", "BertForMaskedLM", **SIZES, quick=True),
    encoder("roberta", "RobertaForMaskedLM", **SIZES, pad_token_id=0),
    encoder("albert", "AlbertForMaskedLM", **SIZES, embedding_size=16),
    encoder("electra", "ElectraForMaskedLM", **SIZES, embedding_size=16),
    encoder(
        "distilbert",
        "DistilBertForMaskedLM",
        dim=HIDDEN,
        hidden_dim=FEED_FORWARD,
        n_layers=1,
        n_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
    ),
    encoder("deberta_v2", "DebertaV2ForMaskedLM", **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("mpnet", "MPNetForMaskedLM", **SIZES),
    encoder(
        "modernbert",
        "ModernBertForMaskedLM",
        **SIZES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
    ),
    encoder("roformer", "RoFormerForMaskedLM", **SIZES, embedding_size=16),
    encoder("convbert", "ConvBertForMaskedLM", **SIZES, embedding_size=16),
    hugging_face(
        "fnet",
        "text, encoder",
        "FNetForMaskedLM",
        language,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=16,
    ),
    both("t5", "T5ForConditionalGeneration", **T5),
    both("mt5", "MT5ForConditionalGeneration", **T5),
    both("bart", "BartForConditionalGeneration", **SEQ2SEQ),
    both("pegasus", "PegasusForConditionalGeneration", **SEQ2SEQ),
    both("m2m_100", "M2M100ForConditionalGeneration", **SEQ2SEQ),
    experts(
        "mixtral",
        "MixtralForCausalLM",
        **GROUPED,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
    ),
    experts("qwen2_moe", "Qwen2MoeForCausalLM", **EXPERTS, shared_expert_intermediate_size=16),
    experts("qwen3_moe", "Qwen3MoeForCausalLM", **EXPERTS, head_dim=8),
    experts("olmoe", "OlmoeForCausalLM", **dict(EXPERTS, intermediate_size=16)),
    experts(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        **dict(GROUPED, num_key_value_heads=HEADS),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=0,
    ),
    experts(
        "gpt_oss",
        "GptOssForCausalLM",
        **GROUPED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    experts(
        "dbrx",
        "DbrxForCausalLM",
        d_model=HIDDEN,
        n_heads=HEADS,
        n_layers=1,
        max_seq_len=16,
        vocab_size=VOCABULARY,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(hidden_size=HIDDEN, ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
        output_router_logits=True,
    ),
    experts(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        padded_language,
        **dict(T5, num_layers=2, num_decoder_layers=2),
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=2,
        router_jitter_noise=0.0,
    ),
    experts(
        "nllb_moe",
        "NllbMoeForConditionalGeneration",
        padded_language,
        **SEQ2SEQ,
        num_experts=4,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
    ),
    recurrent(
        "mamba",
        "MambaForCausalLM",
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        state_size=4,
        time_step_rank=4,
    ),
    recurrent(
        "mamba2",
        "Mamba2ForCausalLM",
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        state_size=4,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    recurrent(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        vocab_size=VOCABULARY,
        state_size=4,
        time_step_rank=4,
    ),
    recurrent(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        **GROUPED,
        lru_width=HIDDEN,
        attention_window_size=4,
        conv1d_width=3,
    ),
]
