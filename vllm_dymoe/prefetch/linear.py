"""The linear predictor, "linear+input", by least squares.

The next layer's gate W_(l+1) on this layer's input x_l is a good predictor already (DyMoE 4.4.1), and costs nothing to
train. What it lacks is the layer's own change of the residual stream. That change, as the gate of layer l+d sees it, is
estimated from the experts E_l that the token chose and from x_l:

    logits_(l+d)  ~  W_(l+d) x_l + b_(l+d) + C [one-hot(E_l), x_l]
    C = argmin  sum over tokens | W_(l+d) (x_(l+d) - x_l) - C [one-hot(E_l), x_l] |^2  +  lambda |C|^2

Only two sums over tokens are needed, X^T X and X^T Y, so no input has to be kept: training can run while a server
serves (``online``). The ridge pulls C to 0, that is, to the next gate: with few tokens a predictor is hardly better
than that gate, but hardly worse. Least squares on one-hot targets would need ten times as many tokens
(benchmarks/predictors).
"""

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.prefetch.folded import FoldedMLP
from vllm_dymoe.trace.gates import GateWeights, Scoring, correction_name

PRIOR_TOKENS = 512
"""Weight of the next gate, in tokens of average inputs: 256 to 1024 are equally good, 64 loses below 1500 tokens."""
_LARGEST = 1e4  # largest usable router input; a larger one, or NaN, would spoil the sums for good


class LeastSquares:
    """Sums over tokens, from which the networks of some layers are solved.

    Args:
        sizes: of the model.
        layers: layers whose states are used; the last layer of the model has no layer after it.
        look_ahead: how many layers ahead are predicted.
    """

    def __init__(self, sizes: ModelIdentity, layers: range, look_ahead: int, device: torch.device) -> None:
        self.layers, self.tokens = layers, 0
        self._sizes, features = sizes, sizes.num_experts + sizes.hidden
        shape = features, features
        self._gram = torch.zeros(len(layers), *shape, dtype=torch.float32, device=device)
        targets = [sum(layer + ahead < sizes.num_layers for layer in layers) for ahead in range(1, look_ahead + 1)]
        shape = features, sizes.num_experts
        self._cross = [torch.zeros(count, *shape, dtype=torch.float32, device=device) for count in targets]

    @staticmethod
    def layer_bytes(sizes: ModelIdentity, look_ahead: int) -> int:
        """Return the bytes of the sums of one layer."""
        features = sizes.num_experts + sizes.hidden
        return 4 * features * (features + look_ahead * sizes.num_experts)

    @torch.no_grad()
    def add(self, gates: GateWeights, x: torch.Tensor, experts: torch.Tensor) -> None:
        """Add tokens: their router inputs and chosen experts.

        ``x`` is [layers of the model, tokens, hidden], ``experts`` int [layers, tokens, top_k]. Tokens with an unusable
        input count as zeros.
        """
        usable = (x.abs() < _LARGEST).all(-1).all(0)[:, None]
        for place, layer in enumerate(self.layers):
            here = _features(x[layer], experts[layer], self._sizes.num_experts).where(usable, 0)
            self._gram[place].addmm_(here.T, here)
            for ahead, cross in enumerate(self._cross, 1):
                if place < len(cross):
                    change = (x[layer + ahead].float() - x[layer].float()).where(usable, 0)
                    cross[place].addmm_(here.T, change @ gates.weights[layer + ahead].float().T)
        self.tokens += x.shape[1]

    @torch.no_grad()
    def solve(self, layer: int, gates: GateWeights, network: FoldedMLP) -> None:
        """Write a layer's solution into a network of :func:`make_network`."""
        place = layer - self.layers.start
        gram = self._gram[place].double()
        ridge = PRIOR_TOKENS / max(self.tokens, 1) * gram.diagonal().mean()
        gram.diagonal().add_(ridge.clamp(min=1e-6))
        factor = torch.linalg.cholesky(gram)
        for ahead, cross in enumerate(self._cross, 1):
            if place < len(cross):
                change = torch.cholesky_solve(cross[place].double(), factor).float()
                _write(network, gates, layer, ahead, self._sizes.top_k, change)


def make_network(
    sizes: ModelIdentity, look_ahead: int, device: torch.device, dtype: torch.dtype, corrected: Scoring | None = None
) -> FoldedMLP:
    """Return a network that knows nothing, of zeros.

    ``corrected`` is the scoring of the model's correction, if it has one; the network then has room for it.
    """
    layers, experts = sizes.num_layers, sizes.num_experts
    shapes: dict[str, tuple[int, ...]] = {"popularity": (layers, experts)}
    for ahead in range(1, look_ahead + 1):
        name = "" if ahead == 1 else f".{ahead}"
        shapes[f"tables{name}"] = layers - ahead, experts, experts
        shapes[f"gates{name}"] = layers - ahead, sizes.hidden, experts
    tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    if corrected is not None:
        tensors[correction_name(corrected)] = torch.zeros(layers, experts, dtype=torch.float32, device=device)
    return FoldedMLP(tensors)


@torch.no_grad()
def ask_next_gates(network: FoldedMLP, gates: GateWeights, top_k: int) -> None:
    """Make a network predict what the gates of the next layers predict.

    The gates are evaluated on a layer's input. Their correction is written as well.
    """
    for ahead in range(1, network.look_ahead + 1):
        for layer in range(network.num_layers - ahead):
            _write(network, gates, layer, ahead, top_k)
    for name, correction in gates.named_correction().items():
        network.tensors[name].copy_(correction)


def _features(x: torch.Tensor, experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return [one-hot(E), x] of tokens, float32 [tokens, num_experts + hidden].

    Ids of no expert are left out.
    """
    chosen = torch.zeros(len(x), num_experts + 1, dtype=torch.float32, device=x.device)
    chosen.scatter_(1, experts.long().where((experts >= 0) & (experts < num_experts), num_experts), 1.0)
    return torch.cat([chosen[:, :-1], x.float()], 1)


def _write(
    network: FoldedMLP, gates: GateWeights, layer: int, ahead: int, top_k: int, change: torch.Tensor | None = None
) -> None:
    """Write a layer's table and matrix: the next gate plus a change.

    ``change`` is [features, experts]. Rows of a table are added for each of ``top_k`` experts, so each row contains a
    share of the bias.
    """
    table, matrix = (network.tables, network.gates) if ahead == 1 else network.further[ahead - 2]
    assert matrix is not None
    later, experts = layer + ahead, table.shape[1]
    bias, weights = gates.biases[later] / top_k, gates.weights[later].T.float()
    table[layer] = bias if change is None else change[:experts] + bias
    matrix[layer] = weights if change is None else change[experts:] + weights


def hits(scores: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of each token's experts are among the best scores.

    Also returns whether all of them are. Scores are [tokens, num_experts], ``experts`` int [tokens, top_k]; the results
    are int64 and bool [tokens].
    """
    return hits_of(scores.topk(experts.shape[1]).indices, experts)


def hits_of(named: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as :func:`hits` for predicted experts, int [tokens, top_k]."""
    found = (named[:, :, None] == experts[:, None]).any(1).sum(1)
    return found, found == experts.shape[1]


def train_on(
    gates: GateWeights, sizes: ModelIdentity, experts: torch.Tensor, x: torch.Tensor, popularity: torch.Tensor,
    look_ahead: int, block: int = 1024,
) -> FoldedMLP:  # fmt: skip
    """Return the network for a set of tokens, in float32.

    ``experts`` are int [tokens, layers, top_k], ``x`` [tokens, layers, hidden]; ``popularity`` is Eq. 2 of
    DuoServe-MoE, [layers, experts].
    """
    look_ahead = min(look_ahead, sizes.num_layers - 1)
    sums = LeastSquares(sizes, range(sizes.num_layers - 1), look_ahead, x.device)
    for some, chosen in zip(x.split(block), experts.split(block), strict=True):
        sums.add(gates, some.transpose(0, 1), chosen.transpose(0, 1))
    corrected = None if gates.correction is None else gates.scoring
    network = make_network(sizes, look_ahead, x.device, torch.float32, corrected)
    ask_next_gates(network, gates, sizes.top_k)
    network.popularity.copy_(popularity)
    for layer in sums.layers:
        sums.solve(layer, gates, network)
    return network
