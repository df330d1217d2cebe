"""Runs the trainer of single ranks of a large run on fake GPUs, and compares their operations.

device_guard     compiles and loads a library that lets torch run on fake tensors of cuda
fake_devices     replaces the GPU
meter            counts the fake GPU's bytes and kernels, and stops of the host
recording        replaces the other ranks, and records the operations with them
rehearsal        chooses the ranks of a run that are run, and runs them
matching         compares the ranks' operations, and finds deadlocks
answers          puts the results into words
"""
