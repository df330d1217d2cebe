"""What a run tells, and what it checks while it trains.

log             log line, metrics.jsonl, run.json, summary
step_stats      every rank's seconds and memory at a step's end; slow ranks
memory_report   measured memory by stage beside what was predicted
loss_monitor    loss spikes and losses that are not finite
replica_check   copies of weights and state are equal, bit for bit
step_trace      one step as a Chrome trace
"""
