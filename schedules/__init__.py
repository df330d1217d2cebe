"""Pipeline schedules as data: built, checked, simulated, drawn. No torch.

    schedule         actions, the named schedules, what makes one valid
    list_scheduling  orders found by a greedy simulation
    simulation       when each action runs, how long it all takes, how much time is idle
    compiler         what is fastest in simulation: partition, placement and order
    vocabulary       passes for embedding and head that are spread over all ranks
    costs            what a layout's stages take and may hold
    automatic        what --schedule auto decides for a run
    drawing          grids of characters, events of a Chrome trace
    partition        which blocks each stage holds

The pipeline executes the object that the planner prices.
"""
