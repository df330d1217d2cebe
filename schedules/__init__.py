"""Pipeline schedules as data: built, checked, simulated, drawn. No torch.

    schedule     actions, the named schedules, what makes one valid
    simulation   when each action runs, the bubble, drawings

The pipeline executes the object that the planner prices.
"""
