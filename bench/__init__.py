"""What a request costs: the gateway beside a plain aiohttp pass-through proxy, in CPU time, measured in one run.

`python -m bench` (or `make bench`) starts a canned upstream (nginx), the plain proxy and the gateway, drives them in
turn with wrk, and reads the processes' own CPU times. A new scenario is a line in `bench/scenarios.py`.
"""
