"""Any rank of any world without its cluster: the trainer on fake GPUs, and all ranks' operations.

device_guard compiles and loads what lets torch run on fake tensors of device cuda; fake_devices is
the GPU, meter counts its bytes, kernels and stops of the host. recording stands for the other ranks
and writes down what a rank does with them. rehearsal chooses the ranks of a world and runs
them, matching compares their operations and finds deadlocks among them, answers says it in words.
"""
