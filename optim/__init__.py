"""The parts of zero.py: update rules, gradient buckets, loss scale, full sharding.

buckets       flat buffers of weights and gradients, with a part for each replica
update_rules  learning rate; AdamW, Adafactor, SGD on master tensors
muon          Muon: momentum, Newton-Schulz iteration, scale
matrix_owners  whole matrices meet at one rank each, and their updates return
weight_average  an exponential moving average of the weights (--ema)
adam8bit      AdamW with moments of 8 bits
precision     the number format of a run: what --precision auto is
loss_scale    the factor that keeps fp16 gradients above zero
balance       the balance between experts, and the tensors that no gradient updates
fsdp          --zero 3, by torch's fully_shard
"""
