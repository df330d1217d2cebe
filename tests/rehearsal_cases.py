"""Right configurations: presets, layouts, features; tests rehearse those IN_SUITE."""

SMALL = "--layers 8 --hidden 1024 --heads 16 --seq-length 1024 --micro-batch-size 2"
SMALL += " --global-batch-size 64 --precision bf16 "
LLAMA = "--kv-heads 4 --positions rotary --norm rmsnorm --activation swiglu --no-bias --no-tied "
EXPERTS = LLAMA + "--set qk_norm=head --experts 16 --experts-per-token 8 --ffn-hidden 256 "
EXPERTS += "--vocab-size 1024 --micro-batch-size 8 "
BLOOM = "--positions alibi --set embedding_norm=true "
NOW_AND_THEN = "--sample-every 5 --sample-prompt 1"

# Name: ranks, and words of the command line.
CASES: dict[str, tuple[int, str]] = {
    "one rank": (1, SMALL),
    "tp 2 pp 2 dp 2": (8, SMALL + "--tp 2 --pp 2"),
    "sequence parallel": (4, SMALL + "--tp 4 --sequence-parallel " + NOW_AND_THEN),
    "384 ranks": (384, SMALL + "--layers 12 --tp 4 --pp 6 --global-batch-size 1024"),
    "ZeRO 2, pp 2": (4, SMALL + "--pp 2 --zero 2 " + NOW_AND_THEN),
    "ZeRO 3": (4, SMALL + "--zero 3 " + NOW_AND_THEN),
    "Llama's features": (4, SMALL + LLAMA + "--tp 2"),
    "ALiBi, full recomputation": (4, SMALL + BLOOM + "--pp 2 --recompute full"),
    "fp16, overlap": (2, SMALL + "--precision fp16 --overlap-param-gather " + NOW_AND_THEN),
    "Muon": (2, SMALL + "--optimizer muon"),
    "masks, pp 2": (2, SMALL + "--pp 2 --objective prefix --reset-attention --eod-token 0"),
    "cp 4 over heads and keys, tp 2": (8, SMALL + "--cp 4 --tp 2 --kv-heads 4 --seq-length 4096"),
    "experts of 4 ranks": (4, SMALL + EXPERTS + "--ep 4 --global-batch-size 128"),
    "experts recomputed, pp 2": (4, SMALL + EXPERTS + "--ep 2 --pp 2 --recompute full"),
    "cp 4 over heads, pp 2": (8, SMALL + BLOOM + "--cp 4 --pp 2 --recompute selective"),
    "masks over keys of 4 ranks": (4, SMALL + "--cp 4 --kv-heads 1 --objective prefix"),
    "one rank, fp32": (1, SMALL + "--precision fp32"),
    "tp 2": (2, SMALL + "--tp 2"),
    "tp 8": (8, SMALL + "--tp 8"),
    "tp 8, sequence parallel, bf16 gradients": (
        8,
        SMALL + "--tp 8 --sequence-parallel --grad-dtype bf16",
    ),
    "pp 2": (2, SMALL + "--pp 2"),
    "pp 4": (4, SMALL + "--pp 4"),
    "pp 8": (8, SMALL + "--pp 8"),
    "gpipe": (4, SMALL + "--pp 4 --schedule gpipe --global-batch-size 16"),
    "dp 8": (8, SMALL),
    "ZeRO 0": (8, SMALL + "--zero 0"),
    "ZeRO 2": (8, SMALL + "--zero 2"),
    "ZeRO 2, tp 2, sequence parallel": (8, SMALL + "--zero 2 --tp 2 --sequence-parallel"),
    "ZeRO 3, tp 2": (8, SMALL + "--zero 3 --tp 2"),
    "ZeRO 3, Llama's features": (8, SMALL + LLAMA + "--zero 3"),
    "selective recomputation": (2, SMALL + "--tp 2 --recompute selective"),
    "full recomputation": (2, SMALL + "--recompute full"),
    "half of the blocks recomputed": (2, SMALL + "--recompute full --recompute-layers 4"),
    "full, sequence parallel": (4, SMALL + "--recompute full --tp 4 --sequence-parallel"),
    "untied": (4, SMALL + "--no-tied --pp 2"),
    "rotary": (2, SMALL + "--positions rotary"),
    "grouped queries": (2, SMALL + "--kv-heads 4 --tp 2"),
    "SwiGLU": (2, SMALL + "--activation swiglu"),
    "SGD": (2, SMALL + "--optimizer sgd"),
    "Adafactor": (2, SMALL + "--optimizer adafactor --zero 0"),
    "overlap, pp 2": (8, SMALL + "--pp 2 --overlap-param-gather"),
    "gpt2-124m": (
        8,
        "--model gpt2-124m --precision bf16 --micro-batch-size 4 --global-batch-size 64",
    ),
    "gpt2-1.5b, tp 5": (
        10,
        "--model gpt2-1.5b --tp 5 --precision bf16 --global-batch-size 64",
    ),
    "1b3, pp 2": (16, "--model 1b3 --pp 2 --precision fp16 --global-batch-size 512"),
    "104b": (
        128,
        "--model 104b --tp 4 --pp 8 --precision bf16 --recompute full --global-batch-size 512",
    ),
    "176b": (
        384,
        "--model bloom-176b --tp 4 --pp 12 --partition blocks --micro-batch-size 2 --precision bf16"
        " --recompute full --global-batch-size 2048",
    ),
}
IN_SUITE = list(CASES)[:15]
