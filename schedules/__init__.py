"""Pipeline schedules as data: built, checked, simulated, drawn. No torch.

    actions          what a pass needs, and all passes of a schedule as numbers
    schedule         the actions of every rank, and what makes a schedule valid
    simulation       when each action runs, how much time is idle; grids and Chrome traces
    interleaved      the interleaved schedule: its groups, its end, its memory
    orders           makes every schedule: `build`, with list_scheduling; `schedule_for`
    long_schedule    what a schedule of many micro-batches takes and holds
    partition        which blocks each stage holds, by the seconds of a model's parts

The pipeline executes the object that the planner prices.
"""
