"""Watching what a runtime computes, whatever way its experts have taken to the device."""


def watch_computed(runtime, told):
    """Call ``told(layer, expert, tier, slot)`` for every expert, right after its rows were computed."""
    forward, begin = runtime.forward, runtime.kernel.begin
    running = []

    def layer_of(routing, *arguments):
        running[:] = [routing.layer]
        return forward(routing, *arguments)

    def watched(*arguments, **named):
        work = begin(*arguments, **named)
        place, compute, slots = work.place, work.compute, {}
        there = {
            slot.expert.gate.weight.data_ptr(): (tier, slot)
            for tier, pool in runtime.memory.pools.items()
            for slot in pool.slots
        }

        def placed(expert, packed):
            slots[expert] = there[packed[0].weight.data_ptr()]
            place(expert, packed)

        def computed(experts, receive=None):
            compute(experts, receive)
            for expert in experts:
                told(running[0], expert, *slots[expert])

        work.place, work.compute = placed, computed
        return work

    runtime.forward, runtime.kernel.begin = layer_of, watched
