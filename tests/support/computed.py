"""Watching what a runtime computes, whatever way its experts have taken to the device."""


def watch_computed(runtime, told):
    """Call ``told(layer, expert, tier, slot)`` for every expert, or slice, right after its rows were computed."""
    forward, begin = runtime.serving.forward, runtime.kernel.begin
    running = []

    def layer_of(routing, *arguments):
        running[:] = [routing.layer]
        return forward(routing, *arguments)

    def watched(*arguments, **named):
        work = begin(*arguments, **named)
        place, compute, slots = work.place, work.compute, {}
        there = {
            slot.blob.data_ptr(): (tier, slot) for tier, pool in runtime.memory.pools.items() for slot in pool.slots
        }

        def placed(expert, packed):
            gate = packed.gate
            parts = (gate.weight,) if gate.fine is None else (gate.weight, gate.fine)
            slots[expert] = [there[part.data_ptr()] for part in parts]
            place(expert, packed)

        def computed(experts, receive=None):
            compute(experts, receive)
            for expert in experts:
                for tier, slot in slots[expert]:
                    told(running[0], expert, tier, slot)

        work.place, work.compute = placed, computed
        return work

    runtime.serving.forward, runtime.kernel.begin = layer_of, watched
