"""The sandbox for model-written code: each program runs in namespaces of its own, started by bubblewrap."""

from asyncrl.sandbox.base import Input as Input
from asyncrl.sandbox.base import Output as Output
from asyncrl.sandbox.sandbox import Sandbox as Sandbox
