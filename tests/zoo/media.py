"""Models of images and sound, alone or with text."""

from __future__ import annotations

import torch

from tests.zoo.entry import (
    BATCH,
    CLASSES,
    FEED_FORWARD,
    HEADS,
    HIDDEN,
    SEQUENCE,
    VOCABULARY,
    Entry,
    Inputs,
    hugging_face,
    images,
    labels_of,
    segmented,
    token_ids,
)

ENCODER = dict(hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=FEED_FORWARD)
IMAGE = dict(ENCODER, image_size=12, patch_size=4)
WINDOWS = dict(image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=2)
WAVE = dict(
    ENCODER,
    vocab_size=VOCABULARY,
    conv_dim=(8, 8),
    conv_kernel=(5, 3),
    conv_stride=(4, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    apply_spec_augment=False,
    num_labels=CLASSES,
)


def vision(name: str, model: str, size: int = 12, **sizes: object) -> Entry:
    return hugging_face(name, "vision", model, images(size), num_labels=CLASSES, **sizes)


def audio(name: str, model: str, **sizes: object) -> Entry:
    return hugging_face(name, "audio", model, lambda: spectra("input_values", 128), **sizes)


def spectra(name: str, *shape: int) -> Inputs:
    return {name: torch.randn(BATCH, *shape), "labels": torch.randint(0, CLASSES, (BATCH,))}


def said() -> Inputs:
    """Return waveforms and their transcripts, whose lengths differ."""
    labels = torch.randint(1, VOCABULARY, (BATCH, 4))
    kept = torch.arange(4) < 2 + torch.arange(BATCH)[:, None] % 3
    return {"input_values": torch.randn(BATCH, 128), "labels": labels.where(kept, -100)}


def whisper() -> Inputs:
    return {"input_features": torch.randn(BATCH, 6, 16), "labels": labels_of(token_ids(4))}


def captions() -> Inputs:
    """Return images and texts that match by position."""
    return {
        "input_ids": token_ids(),
        "pixel_values": torch.randn(BATCH, 3, 12, 12),
        "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "return_loss": True,
    }


def matched() -> Inputs:
    return {k: t for k, t in captions().items() if k != "return_loss"}


def answered() -> Inputs:
    batch = matched()
    return batch | {"labels": labels_of(batch["input_ids"])}


def llava() -> Inputs:
    """Return texts in which nine positions stand for the patches of an image."""
    ids = token_ids(14)
    ids[:, 1:10] = VOCABULARY - 1
    ids[:, 10:] = ids[:, 10:].clamp(max=VOCABULARY - 2)
    ids[:, 0] = 3
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 12, 12), "labels": labels_of(ids)}


TEXT = dict(ENCODER, vocab_size=VOCABULARY, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0)
PAIR = dict(text_config=dict(TEXT, projection_dim=16), vision_config=dict(IMAGE, projection_dim=16), projection_dim=16)

MEDIA = [
    vision("vit", "ViTForImageClassification", **IMAGE),
    vision("deit", "DeiTForImageClassification", **IMAGE),
    vision("beit", "BeitForImageClassification", **IMAGE),
    vision("dinov2", "Dinov2ForImageClassification", **IMAGE),
    vision("swin", "SwinForImageClassification", 16, **WINDOWS),
    vision("swinv2", "Swinv2ForImageClassification", 16, **WINDOWS),
    vision(
        "convnext",
        "ConvNextForImageClassification",
        16,
        patch_size=2,
        num_stages=2,
        hidden_sizes=[8, 12],
        depths=[1, 1],
    ),
    vision("resnet", "ResNetForImageClassification", 16, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1]),
    vision(
        "regnet",
        "RegNetForImageClassification",
        16,
        embedding_size=8,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        groups_width=4,
    ),
    vision(
        "poolformer",
        "PoolFormerForImageClassification",
        32,
        hidden_sizes=[8, 12],
        depths=[1, 1],
        num_encoder_blocks=2,
        patch_sizes=[3, 3],
        strides=[2, 2],
        padding=[1, 1],
    ),
    vision(
        "pvt",
        "PvtForImageClassification",
        32,
        image_size=32,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_attention_heads=[2, 4],
        num_encoder_blocks=2,
        sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    hugging_face(
        "segformer",
        "vision",
        "SegformerForSemanticSegmentation",
        segmented(16),
        num_labels=CLASSES,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        decoder_hidden_size=12,
    ),
    audio("wav2vec2", "Wav2Vec2ForSequenceClassification", **WAVE),
    hugging_face("wav2vec2_ctc", "audio", "Wav2Vec2ForCTC", said, **WAVE, pad_token_id=0, ctc_zero_infinity=True),
    audio("hubert", "HubertForSequenceClassification", **WAVE),
    hugging_face(
        "whisper",
        "audio",
        "WhisperForConditionalGeneration",
        whisper,
        d_model=HIDDEN,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FEED_FORWARD,
        decoder_ffn_dim=FEED_FORWARD,
        vocab_size=VOCABULARY,
        num_mel_bins=6,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    hugging_face(
        "ast",
        "audio",
        "ASTForAudioClassification",
        lambda: spectra("input_values", 24, 12),
        **ENCODER,
        max_length=24,
        num_mel_bins=12,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        num_labels=CLASSES,
    ),
    hugging_face("clip", "multimodal", "CLIPModel", captions, **PAIR),
    hugging_face(
        "siglip",
        "multimodal",
        "SiglipModel",
        captions,
        text_config=dict(TEXT, projection_size=HIDDEN),
        vision_config=IMAGE,
    ),
    hugging_face(
        "blip",
        "multimodal",
        "BlipForConditionalGeneration",
        answered,
        text_config=dict(TEXT, encoder_hidden_size=HIDDEN),
        vision_config=IMAGE,
    ),
    hugging_face("git", "multimodal", "GitForCausalLM", answered, **TEXT, vision_config=IMAGE),
    hugging_face(
        "llava",
        "multimodal",
        "LlavaForConditionalGeneration",
        llava,
        text_config=dict(TEXT, model_type="llama", num_key_value_heads=2),
        vision_config=dict(IMAGE, model_type="clip_vision_model", num_hidden_layers=2),
        image_token_index=VOCABULARY - 1,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    ),
]
