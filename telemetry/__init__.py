"""The reports of a run about itself, and what it checks while it trains.

observer        the points of a step at which the trainer calls every observer
log             log line, metrics.jsonl, run.json, summary
log_lines       the text of log lines
start_of_run    the checkpoint of --resume, and what was done before
parts           the files of a run's earlier starts, and of another run in its folder
row_file        rows that wait in memory while the disk is full
run_time        an estimate of the time of a run on CPUs, before its first step
step_stats      every rank's seconds and memory at the end of a step
stragglers      ranks that compute longer than the others of their stage
saving          which steps are saved
loss_monitor    loss spikes, what --on-spike does about them, losses that are not finite
expected_curve  the curve of --expect, and where the loss leaves its band
replica_check   copies of weights and state are equal, bit for bit
trackers        TensorBoard and Weights & Biases
audit           replicas repeat a micro-batch and compare every product
routing_file    the experts that every token takes, written or given
numerics_trace  sketches of all tensors of a step, for runs.py diff
sketches        12 numbers of a tensor that add up over its parts
transformers_trace  sketches of a forward pass of transformers' model, for runs.py diff
torch_profile   torch.profiler's trace of one step
step_times      passes and waits of every rank in some steps, for plan.py gap

The list of a run's observers is `Trainer._make_observers`.
"""
