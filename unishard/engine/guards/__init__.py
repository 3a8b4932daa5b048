"""The guards of the training loop: each finds one mistake that trains wrongly in silence, hangs, or loses data.

They are a list (`unishard.engine.assembly.training_guards`); the loop calls them at its points and knows none of them.

| Guard | What it prevents | When it looks | What a look costs |
|---|---|---|---|
| `unfit_loss` | a backward through nothing, or past the engine | always | attributes of a tensor |
| `late_unfreezing` | a layer with gradients and without updates | closely | a walk over the parameters |
| `added_modules` | a layer or a hook that no engine knows | closely | a walk over the modules |
| `parameter_writes` | a weight that is written by hand and lost | always | versions; closely bits, by modules |
| `inplace_writes` | gradients without an in-place operation | closely | versions, by modules |
| `copied_containers` | a list of the caller that gets no entries | closely | the entries, by modules |
| `inference_mode` | wrong gradients, after a forward in inference mode inside another | closely | a flag, by modules |
| `freed_views` | a SIGSEGV | closely | a walk over attributes, by modules |
| `edited_gradients` | a clipping that one engine sees | always | versions of gradients; closely some elements |
| `other_parameters` | weights that no update changes, or each rank its own | at updates | a walk over the graph |
| `reached_parameters` | sums of gradients of different parameters, a hang | always | at updates a walk over the graph |
| `divided_loss` | gradients that are divided twice | at updates, once | the last nodes of the graph of a loss |
| `foreign_backward` | gradients that are mixed or not reduced | always | a hook on outputs; closely on inputs |
| `equal_options` | learning rates that differ between ranks | where calls are compared | the options of the groups |
| `equal_weights` | weights that differ between ranks | where calls are compared | a sum of bits on the device |
| `unshared_data` | the same samples on all ranks, no position in the data | at updates | a hash of some inputs |
| `ended_schedule`, `skipped_updates` | a run that trains nothing any more | always | a number |
| `mixed_positions` | a layer that sees a part of a sequence | first, and at updates | 3 to 4 forwards, later 2 |
| `unweighed_loss` | a mean of uneven parts, or with padding | always | the last nodes of the graph of a loss |
| `recomputed_attention` | attention over a part, in backward | always | an attribute |
| `cut_blocks` | heads and features of a part, taken for those of the whole | first | 2 forwards of a block |

"By modules": `module_hooks` registers hooks on modules, once for all guards, and tells them.

The last four are there with `parallel`.

When: `Sampling` chooses the updates, and in each the micro-batches, that are looked at closely: all of the first ten
updates, in which a habit shows, and later one micro-batch of one update in 40.

`guarded_module` guards the module itself, whose methods a script may call at any time.
"""
