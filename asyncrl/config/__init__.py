"""Every setting of a run and every check of one: frozen structs, no runtime package.

`Run` is the whole; each part has a file named after its key. `load` turns composed YAML into a checked Run.
"""

from asyncrl.config.run import Buffer as Buffer
from asyncrl.config.run import Checkpoint as Checkpoint
from asyncrl.config.run import Checkpoints as Checkpoints
from asyncrl.config.run import Evaluation as Evaluation
from asyncrl.config.run import Flow as Flow
from asyncrl.config.run import Recovery as Recovery
from asyncrl.config.run import Rollout as Rollout
from asyncrl.config.run import Run as Run
from asyncrl.config.run import Sentinel as Sentinel
from asyncrl.config.run import WarmStart as WarmStart
from asyncrl.config.run import check as check
from asyncrl.config.run import load as load
from asyncrl.config.trainer import Trainer as Trainer
from asyncrl.config.user_code import Reward as Reward
from asyncrl.config.weights import Weights as Weights
