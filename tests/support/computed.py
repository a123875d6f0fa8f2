"""Watching what a runtime computes, whatever way its experts have taken to the device."""


def watch_computed(runtime, told):
    """Call ``told(layer, expert, tier, slot)`` for every expert, or slice, right after its rows were computed."""
    forward, begin = runtime.serving.forward, runtime.kernel.begin
    running = []

    def layer_of(routing, *arguments):
        running[:] = [routing.layer]
        return forward(routing, *arguments)

    def watched(*arguments, **named):
        vars(runtime.kernel).pop("compute", None)  # what a step before has left
        begin(*arguments, **named)
        decision, compute = arguments[1], runtime.kernel.compute
        place, slots = decision.place, {}
        there = {
            slot.blob.data_ptr(): (tier, slot) for tier, pool in runtime.memory.pools.items() for slot in pool.slots
        }

        def placed(item, packed):
            gate = packed.gate
            parts = (gate.weight,) if gate.fine is None else (gate.weight, gate.fine)
            slots[item] = [there[part.data_ptr()] for part in parts]
            place(item, packed)

        def computed(items, receive=None):
            compute(items, receive)
            for item in items:
                for tier, slot in slots[item]:
                    told(running[0], int(decision.experts[item]), tier, slot)

        decision.place, runtime.kernel.compute = placed, computed

    runtime.serving.forward, runtime.kernel.begin = layer_of, watched
