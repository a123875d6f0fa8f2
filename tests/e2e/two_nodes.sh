#!/usr/bin/env bash
# Two nodes on one machine, by hand and as root: network namespaces with an address and a store each, tensor parallelism
# over both by vLLM's multiprocessing executor. One is killed with -9, and a restart finds both stores. Two minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d) model=$PWD/benchmarks/tiny_moe/model vllm=${VLLM:-$PWD/.venv/bin/vllm}
declare -A process

clean() {
  for pid in "${process[@]}"; do kill -9 -- "-$pid" 2>/dev/null || true; done
  ip netns del dymoe0 2>/dev/null || true
  ip netns del dymoe1 2>/dev/null || true
}
trap clean EXIT

ip netns add dymoe0 && ip netns add dymoe1
ip link add link0 netns dymoe0 type veth peer name link1 netns dymoe1
for node in 0 1; do
  ip -n dymoe$node address add 10.77.0.$((node + 1))/24 dev link$node
  ip -n dymoe$node link set link$node up && ip -n dymoe$node link set lo up
done

start() { # node
  local headless=$([ "$1" = 0 ] || echo --headless)
  DYMOE_STORE_DIR=$work/store-$1 VLLM_HOST_IP=10.77.0.$(($1 + 1)) GLOO_SOCKET_IFNAME=link$1 VLLM_CPU_KVCACHE_SPACE=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=30 setsid ip netns exec dymoe$1 "$vllm" serve "$model" \
    --quantization dymoe --additional-config '{"dymoe": {"expert_budget": "25%"}}' --enforce-eager \
    --max-model-len 512 --tensor-parallel-size 2 --nnodes 2 --node-rank $1 --master-addr 10.77.0.1 $headless \
    >"$work/node-$1-$run.log" 2>&1 &
  process[$1]=$!
}

ask() {
  ip netns exec dymoe0 curl -s 10.77.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d "{\"model\": \"$model\", \"prompt\": \"def add(a, b):\", \"max_tokens\": 12, \"temperature\": 0}"
}

serve() { # run: both nodes, until they answer
  run=$1
  start 0 && start 1
  until ip netns exec dymoe0 curl -sf 10.77.0.1:8000/health; do
    kill -0 "${process[0]}" || { tail -n 30 "$work"/node-*; exit 1; }
    sleep 1
  done
  ask | grep -o '"text":"[^"]*"' | tee "$work/answer-$run"
}

serve first
kill -9 -- "-${process[1]}"
SECONDS=0
ask | cut -c1-200 || true # the first node learns of it in its next step
for second in $(seq 60); do kill -0 "${process[0]}" 2>/dev/null && sleep 1; done
kill -0 "${process[0]}" 2>/dev/null && { echo "node 0 goes on without node 1"; exit 1; }
echo "node 0 ended $SECONDS s after node 1: $(grep -h -o 'Connection \(closed\|reset\) by peer.*' "$work/node-0-first.log" | head -n 1)"
serve second
cmp "$work/answer-first" "$work/answer-second"
grep -h -o 'the experts are packed already.*' "$work"/node-?-second.log
