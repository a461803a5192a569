"""The zoo: tiny models of many architectures, called as their users call them."""

from __future__ import annotations

from tests.clients.client import Client
from tests.clients.diffusion import DIFFUSION
from tests.clients.language import LANGUAGE
from tests.clients.perception import PERCEPTION
from tests.clients.pipelines import PIPELINES
from tests.clients.primitives import PRIMITIVES

CLIENTS: list[Client] = [*PRIMITIVES, *LANGUAGE, *PERCEPTION, *DIFFUSION, *PIPELINES]
