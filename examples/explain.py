"""The README's example in Python: what a rank reads from each source when two engines have different shapes."""

from kvferry import Engine, GroupRequest, GroupSpec, Model, Plan, Request

model = Model.load("llama-3.1-8b")
prefill = Engine(model, GroupSpec(64, 16, "L|BPNH"), name="prefill", tp_size=4)
decode = Engine(model, GroupSpec(64, 24, "L|BPHN"), name="decode", tp_size=2)
plan = Plan(decode.shard(0), prefill)
plan.verify()

# 40 tokens: blocks 7, 3, 9 there, blocks 5, 1 here.
request = Request(plan, [GroupRequest([5, 1], [7, 3, 9], 0, 40)])
for source, rank in enumerate(plan.sources):
    print(f"rank {rank} sends {request.bytes(source)} bytes in {request.run_count(source)} runs")
