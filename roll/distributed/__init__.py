"""Clusters of workers: where they are placed, how they are started, called and ended.

Only this package schedules Ray actors. `ResourceManager` (on Ray) and `LocalLauncher` (in this
process) start a `Cluster[W]` from a worker class and a `Placement`. The driver then passes worker
methods as values: `cluster.call(Worker.ping)`. One `Watchdog` notices the failures of all workers:
it holds one call per actor that never returns, and every wait of the driver asks the watchdog
whether a worker died.
"""
