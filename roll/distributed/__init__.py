"""The only place that schedules Ray actors: pools, slots, clusters of workers, and their end.

`ResourceManager` (Ray) and `LocalLauncher` (this process) start a `Cluster[W]` from a worker class
and a `Placement`; the driver then calls worker methods as values: `cluster.call(Worker.ping)`.
Failure is noticed centrally: a `Watchdog` holds one never-ending call per actor, and every wait of
the driver asks it whether somebody died.
"""
