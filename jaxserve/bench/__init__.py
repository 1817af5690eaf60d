"""Benchmarks: `jaxserve bench throughput | latency | prefix | startup | host | serve`.

Each is a function that returns a `Report`; docs/performance.md describes the method.
"""
