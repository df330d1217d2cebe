"""Right configurations, in which a rehearsal finds nothing: layouts and features."""

SMALL = "--layers 8 --hidden 1024 --heads 16 --seq-length 1024 --micro-batch-size 2"
SMALL += " --global-batch-size 16 --precision bf16 --vocab-size 16384 "
LLAMA = "--kv-heads 4 --positions rotary --norm rmsnorm --activation swiglu --no-bias --no-tied "
EXPERTS = LLAMA + "--set qk_norm=head --experts 16 --experts-per-token 8 --ffn-hidden 256 "
EXPERTS += "--vocab-size 1024 --micro-batch-size 8 "
MAMBA = "mixer=mamba2 mixer_value_heads=32 mixer_value_size=64 mixer_key_size=128 "
BLOOM = "--positions alibi --set embedding_norm=true "
GPT2_VOCABULARY = "--vocab-size 50257"
NOW_AND_THEN = "--sample-every 5 --sample-prompt 1"

# Name: ranks, and words of the command line.
CASES: dict[str, tuple[int, str]] = {
    "one rank": (1, SMALL),
    "tp 2 pp 2 dp 2": (8, SMALL + "--tp 2 --pp 2"),
    "sequence parallel": (4, SMALL + "--tp 4 --sequence-parallel " + NOW_AND_THEN),
    "384 ranks": (
        384,
        SMALL + "--layers 12 --tp 4 --pp 6 --global-batch-size 256 " + GPT2_VOCABULARY,
    ),
    "ZeRO 2, pp 2": (4, SMALL + "--pp 2 --zero 2 " + NOW_AND_THEN),
    "ZeRO 3": (4, SMALL + "--zero 3 " + NOW_AND_THEN),
    "Llama's features": (4, SMALL + LLAMA + "--tp 2"),
    "ALiBi, full recomputation": (4, SMALL + BLOOM + "--pp 2 --recompute full"),
    "fp16, overlap": (
        2,
        SMALL + "--precision fp16 --set overlap_param_gather=true " + NOW_AND_THEN,
    ),
    "Muon": (2, SMALL + "--optimizer muon " + GPT2_VOCABULARY),
    "masks, pp 2": (2, SMALL + "--pp 2 --objective prefix --reset-attention --eod-token 0"),
    "cp 4 over heads and keys, tp 2": (8, SMALL + "--cp 4 --tp 2 --kv-heads 4 --seq-length 4096"),
    "experts of 4 ranks": (4, SMALL + EXPERTS + "--ep 4 --global-batch-size 64"),
    "experts of 2 nodes": (16, SMALL + EXPERTS + "--ep 16 --tp 2 --global-batch-size 64"),
    "experts recomputed, pp 2": (4, SMALL + EXPERTS + "--ep 2 --pp 2 --recompute full"),
    "gated delta net, tp 2": (
        2,
        SMALL + LLAMA + "--tp 2 --recompute full --set mixer=gated_delta_net mixer_blocks=3:1",
    ),
    "KDA, cp 2": (2, SMALL + LLAMA + "--cp 2 --set mixer=kda mixer_blocks=3:1"),
    "Mamba-2, ZeRO 3": (2, SMALL + LLAMA + "--zero 3 --set mixer_blocks=1:1 " + MAMBA),
    "Mamba-2 beside attention": (2, SMALL + LLAMA + "--tp 2 --set mixer_beside=true " + MAMBA),
    "short convolutions, pp 2": (2, SMALL + LLAMA + "--pp 2 --set mixer=short_conv"),
    "cp 4 over heads, pp 2": (8, SMALL + BLOOM + "--cp 4 --pp 2 --recompute selective"),
}
