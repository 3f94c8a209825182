"""How functions of blocks are run: compiled, or as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.engine.compiled import Compiler, Runner
from megatrain.engine.options import EngineOptions
from megatrain.models import BlockModel, Role
from megatrain.models.templates import stage_templates


@dataclass(frozen=True, kw_only=True)
class Programs:
    """How functions of blocks are run, and the layers' templates if they are compiled."""

    runner: Runner
    templates: Sequence[Role] = ()

    @classmethod
    def of(cls, model: BlockModel, options: EngineOptions) -> "Programs":
        """Compiled if the options say so; what is random runs as it is, to be replayed exactly."""
        if options.compile_backend is None or model.random:
            return cls(runner=Runner())
        runner = Compiler(options.compile_backend)
        return cls(runner=runner, templates=stage_templates(model))

    @property
    def compiler(self) -> Compiler | None:
        return self.runner if isinstance(self.runner, Compiler) else None
