"""Mutants that break a rule, for each rule: the kind of `mutations`, the program that it changes, and a part of the reason.

Rules that no kind breaks alone have programs in `broken_programs`.
"""

REFUSALS: dict[str, list[str]] = {
    "a_checked_step_misses_nothing": [
        "do otherwise on one replica | own optimizer and AdamW, dealt out on 2 after update-in-parts | for a step that is",
        "leave all truths out | own optimizer and AdamW, dealt out on 2 after send-rows | is not told whether",
    ],
    "a_gradient_is_taken_once": [
        "take a gradient again | plain PyTorch on 2 after replicate | of a backward from which it is taken before",
        "take a gradient again | plain PyTorch on 2 after lower-devices | of a backward from which it is taken before",
        "begin backward with another tangent | plain PyTorch on 2 after lower-collectives | takes a gradient of a",
    ],
    "a_program_belongs_to_a_worker": [
        "belong to another worker | own optimizer and AdamW, dealt out on 2 after check-finite | it is the program of",
        "belong to another worker | matrices, sent as a payload by worker 1 of 3 after plan-buckets | devices, but its",
    ],
    "a_step_commits_once": [
        "drop a commit | pairs on 2 after update-in-parts | times, not once",
        "commit too late | pairs on 2, parameters not shared after lower-collectives | writes variables before the commit",
        "commit too early | pairs on 2 after schedule-overlap | can fail, but comes after the commit",
        "commit too early | pairs on 2, parameters not shared after lower-devices | can fail, but comes after the commit",
        "commit early unsaid | matrices, sent as a payload by worker 1 of 3 after lower-devices | is not: replicas commit",
        "commit early alone | pairs on 2, parameters not shared after lower-devices | is an early commit, but no sum over",
    ],
    "accumulated_gradients_are_added_once": [
        "take a program for another kind | pairs on 2, parameters not shared after send-rows | on cpu",
        "update from an unreduced bucket | own optimizer and AdamW, after accumulation on 3 after lower-collectives | without",
    ],
    "all_replicas_take_part": [
        "count a replica twice | pairs on 2, parameters not shared after update-in-parts | joins replicas"
    ],
    "arguments_are_in_order": [
        "exchange two arguments | pairs on 2 after decompose-gelu | the arguments are",
        "exchange two arguments | pairs, clipped and least-loaded on 2 after lower-devices | the arguments are",
    ],
    "buckets_are_exchanged_in_the_order_of_the_plan": [
        "exchange in another order | matrices, sent as a payload by worker 1 of 3 after lower-collectives | the mirrored",
        "exchange twice | packs, worker 0 of 3 after lower-devices | times, not",
    ],
    "buckets_in_flight_are_not_used": [
        "update from another sum | pairs on 2, parameters not shared after lower-collectives | is in flight but used by",
        "update from an unreduced bucket | pairs on 2 after lower-devices | is in flight but used by",
    ],
    "checks_come_first": [
        "check after everything | asserts, checked on 2, parameters not shared after lower-collectives | when it fails",
        "check after the commit | asserts, checked on 2 after lower-devices | when it fails, something may have changed",
    ],
    "collectives_are_waited_for_once": [
        "wait twice | pairs on 2 after lower-collectives | is waited for",
        "drop a wait | pairs on 2 after lower-devices | is waited for",
        "use a pending value | pairs on 2, parameters not shared after send-rows | is in flight but used by",
        "wait for something else | round-robin on 2 after round-robin | is waited for as",
        "change a tag | own optimizer on 2, parameters not shared after lower-devices | is waited for as",
    ],
    "collectives_have_the_same_order": [
        "change a link on one device | pairs on 2, parameters not shared after lower-devices | the devices would wait for"
    ],
    "collectives_match_their_tags": [
        "change what a reduction does | pairs on 2 after insert-all-reduce | but gradients are weighted to be summed",
        "change what a reduction does | matrices, sent as a payload by worker 1 of 3 after lower-devices | but gradients are",
        "broadcast from another replica | own optimizer and AdamW, dealt out on 2 after schedule-overlap | which does not",
        "go by the rows of another | sparse tables on 2, parameters not shared after send-rows | which is no sum of that",
        "send the parameters of another | own optimizer on 2, parameters not shared after lower-devices | which is no sum",
    ],
    "commits_exchange_norms_alike": [
        "exchange less | own optimizer and AdamW, dealt out on 2 after scale-in-updates | all would wait for numbers that"
    ],
    "compressed_sums_are_decompressed": [
        "widen by a cast | pairs, compressed by worker 1 of 3 after send-rows | which is still compressed",
        "widen twice | pairs, compressed by worker 1 of 3 after send-rows | which is no compressed sum of that bucket",
    ],
    "dataflow_is_preserved": [
        "give another loss | pairs on 2 after reuse-arguments | is computed in another way than before",
        "forget to write a slot | pairs on 2 after lower-devices | is computed in another way than before",
    ],
    "each_microbatch_gives_its_factors": [
        "take the factors of a microbatch twice | tables, microbatches on 2 after lower-devices | microbatches, where"
    ],
    "each_microbatch_is_taken_once": [
        "exchange the programs of two devices | products, microbatches on 2, parameters not shared after lower-devices | but",
        "take another microbatch | products, microbatches on 2 after replicate | takes the microbatches",
        "take another microbatch | products, microbatches on 2 after lower-devices | takes the microbatches",
    ],
    "every_bucket_is_packed_once": [
        "pack once more | pairs on 2 after insert-update | is packed",
        "change a tag | pairs on 2, parameters not shared after lower-devices | is packed",
        "move a slot to another bucket | pairs on 2 after schedule-overlap | slots but packs",
        "drop a gradient from a pack | pairs on 2 after lower-devices | slots but packs",
    ],
    "every_bucket_is_updated_once": [
        "drop an update | pairs on 2, parameters not shared after send-rows | is updated",
        "update twice | pairs, compressed by worker 1 of 3 after lower-devices | is updated",
        "store what was received for another | own optimizer and AdamW, dealt out on 2 after schedule-overlap | is updated",
        "change a placement | pairs on 2 after lower-devices | is updated from",
    ],
    "every_collective_has_a_link": [
        "forget a link | pairs on 2 after lower-devices | has no link; run 'lower-collectives' before 'lower-devices'"
    ],
    "every_gradient_is_packed_once": [
        "write another value | reads others on 2 after schedule-overlap | a gradient of bucket",
        "pack a gradient twice | pairs on 2 after share-parameters | packs one gradient into two slots",
    ],
    "every_operation_is_known": [
        "call what is no operation | pairs, clipped and least-loaded on 2 after pack-gradients | is no operation of",
        "call what is no operation | sent as factors by worker 1 of 2 on 1 after lower-devices | is no operation of",
    ],
    "every_send_is_received": [
        "send elsewhere | sparse tables on 2, parameters not shared after lower-collectives | is from replica",
        "send elsewhere | sparse tables on 2, parameters not shared after lower-devices | is from replica",
        "send twice | own optimizer on 2, parameters not shared after update-in-parts | times from replica",
        "drop a send | own optimizer on 2, parameters not shared after lower-devices | times from replica",
    ],
    "gradients_and_slots_match": [
        "duplicate a slot | pairs on 2 after plan-buckets | f is in",
        "drop a slot | pairs on 2 after reserve-memory | the gradient of",
    ],
    "gradients_are_accumulated_once": [
        "accumulate another bucket | own optimizer and AdamW, accumulating on 3, parameters not shared after lower-collectives",
        "accumulate twice | own optimizer and AdamW, accumulating on 3, parameters not shared after lower-collectives",
    ],
    "gradients_are_added_where_they_are": [
        "add to an empty slot | products, microbatches on 2, parameters not shared after update-in-parts | in which nothing",
        "overwrite an earlier microbatch | products, microbatches on 2 after accumulate-microbatches | the gradient that",
    ],
    "gradients_are_clipped_alike": [
        "clip otherwise on one replica | own optimizer and AdamW, dealt out on 2 after scale-in-updates | takes a gradient"
    ],
    "gradients_are_in_their_slots": [
        "exchange two slots | pairs on 2 after schedule-overlap | as whose it is packed",
        "exchange two gradients everywhere | pairs on 2 after lower-devices | as whose it is packed",
    ],
    "gradients_are_left_once": [
        "take a program for another kind | matrices, sent as a payload by worker 1 of 3 after lower-collectives | is added",
        "accumulate another bucket | gradients of worker 1 of 2, on 1 after share-parameters | not the sum of bucket",
    ],
    "gradients_are_unscaled_once": [
        "scale by another factor | own optimizer and AdamW, dealt out on 2 after scale-in-updates | takes is not divided",
        "tell of a part | own optimizer and AdamW, dealt out on 2 after send-rows | the norm that",
    ],
    "graphs_are_those_of_the_stage": [
        "lose the graph | pairs on 2 after lower-collectives | the graphs of a",
        "drop the program of a device | pairs on 2 after recompute-elementwise | replicas run the shard graphs",
        "drop the program of a device | pairs on 2 after lower-devices | which are not the devices in order",
    ],
    "graphs_are_well_formed": [
        "wait before the launch | pairs on 2 after insert-update | graph is malformed",
        "call another region | forward on 3, uneven after lower-devices | graph is malformed",
    ],
    "kept_values_have_memory_of_their_own": [
        "keep a variable | forward on 3, uneven after schedule-overlap | is kept in memory of"
    ],
    "links_join_their_devices": [
        "name a link that cannot be | pairs on 2 after lower-collectives | cannot go over",
        "name a link that cannot be | pairs on 2 after lower-devices | cannot go over",
    ],
    "new_parameters_are_gathered_once": [
        "leave parameters behind | own optimizer and AdamW, dealt out on 2 after update-in-parts | gathers the parameters",
        "gather parameters in another order | own optimizer and AdamW, dealt out on 2 after update-in-parts | another worker",
        "gather old parameters | own optimizer and AdamW, dealt out on 2 after send-rows | it would send old parameters",
    ],
    "no_device_waits_forever": [
        "wait before taking part | own optimizer on 2, parameters not shared after lower-devices | devices would wait for"
    ],
    "norms_count_every_element_once": [
        "measure one twice | pairs, clipped and least-loaded on 2 after scale-in-updates | takes, does not count each",
        "measure one twice | own optimizer and AdamW, dealt out on 2 after lower-devices | takes, does not count each",
        "tell of a part | pairs, clipped and least-loaded on 2 after update-in-parts | tells the norm of",
    ],
    "nothing_is_in_flight_at_a_checked_commit": [
        "wait on one side of the commit | pairs, clipped and least-loaded on 2 after check-finite | comes after the"
    ],
    "nothing_is_written_in_flight": [
        "write slots in flight | pairs on 2 after send-rows | writes into bucket",
        "write slots in flight | own optimizer and AdamW, accumulating on 3 after lower-devices | writes into bucket",
    ],
    "operations_have_their_arguments": [
        "step on other buckets | own optimizer and AdamW, dealt out on 2 after unscale-gradients | values, but is given",
        "leave out an argument | forward on 3, uneven after lower-devices | values, but is given",
    ],
    "outputs_are_gathered_alike": [
        "gather under another name | forward on 3, uneven after insert-update | gathers",
        "gather under another name | forward on 3, uneven after decompose-gelu | or not at all",
        "drop a gather | evaluation, ragged on 3 after lower-devices | or not at all",
    ],
    "owners_update_alone": [
        "copy before the update | pairs, clipped and least-loaded on 2 after spread-copies | takes the parameters of"
    ],
    "packs_keep_their_order": [
        "exchange two buckets results | packs, worker 0 of 3 after pack-gradients | the output takes"
    ],
    "packs_make_up_their_buckets": [
        "move the end of a pack | packs, worker 0 of 3 after lower-collectives | where the next pack begins at",
        "duplicate a slot | packs, worker 0 of 3 after reduce-over-workers | the packs of bucket",
        "number a pack otherwise | packs, worker 0 of 3 after reuse-arguments | they are to number the packs of all",
    ],
    "parts_include_the_residual": [
        "add the rest twice | matrices, sent as a payload by worker 1 of 3 after lower-devices | is for the exchange of a",
        "send a part without the rest | matrices, sent as a payload by worker 1 of 3 after lower-devices | without what",
    ],
    "reductions_fit_the_placement": [
        "change a placement | pairs on 2, parameters not shared after lower-collectives | does not fit its parameters",
        "change a placement | own optimizer and AdamW, least-loaded on 2 after lower-devices | does not fit its",
        "reduce to another device | pairs, clipped and least-loaded on 2 after check-finite | goes to replica",
    ],
    "references_lead_somewhere": [
        "drop a slot | own optimizer and AdamW, dealt out on 2 after shard-optimizer | has no slots",
        "forget a variable | pairs on 2 after plan-buckets | which is no variable",
        "forget a variable | matrices, sent as a payload by worker 1 of 3 after recompute-checkpoints | which is no",
        "drop a bucket | pairs on 2 after send-rows | which there is not",
        "number a pack otherwise | packs, worker 0 of 3 after insert-all-reduce | which there is not",
        "forget a region | pairs on 2, parameters not shared after send-rows | which is no region of the program",
        "misname a gradient | own optimizer and AdamW, dealt out on 2 after check-finite | gives the gradient of",
    ],
    "regions_take_gradients_by_tokens": [
        "compute of which backward | plain PyTorch on 2 after reuse-arguments | computes by itself of which backward it"
    ],
    "regions_write_only_their_memory": [
        "call what is no operation | pairs on 2 after share-parameters | writes its argument; use an operator that gives",
        "call what is no operation | matrices, sent as a payload by worker 1 of 3 after lower-devices | writes its argument",
        "write an argument | pairs on 2 after lower-collectives | which is no slot, nor an argument that dies in",
        "give regions each others slots | products, microbatches on 2, parameters not shared after lower-devices | which is",
        "read what is overwritten | gated on 2 after reuse-arguments | whose memory",
    ],
    "replicas_meet_alike": [
        "meet under another number | meetings, ragged on 3 after replicate | times under the number",
        "leave a meeting out | meetings, ragged on 3, parameters not shared after update-in-parts | times: one would wait",
        "exchange two meetings | meetings, ragged on 3 after lower-collectives | they would wait for each other forever",
        "meet under another number | meetings, evaluated on 2 after lower-devices | they would wait for each other",
        "gather fewer rows | meetings, ragged on 3, parameters not shared after send-rows | rows, and the replicas have",
    ],
    "replicas_meet_only_in_collectives": [
        "use another replicas value | pairs on 2, parameters not shared after lower-collectives | of replica"
    ],
    "replicas_without_examples_run_nothing": [
        "exchange the programs of two devices | evaluation, ragged on 3 after lower-devices | which has no examples",
        "give another replicas result | meetings, ragged on 3 after lower-collectives | gives no loss, but has examples",
        "exchange the programs of two devices | meetings, ragged on 3 after lower-devices | gives no loss, but has",
    ],
    "rescaled_memory_is_not_read_again": [
        "scale twice | own optimizer and AdamW, dealt out on 2 after lower-collectives | may have written its memory"
    ],
    "reserved_values_do_not_overlap": [
        "write slots in flight | tied on 2 after update-in-parts | must be given once, to a region of its own replica",
        "write into each others slots | tied on 2 after replicate | writes more than one product into",
        "write into each others slots | tied on 2 after lower-devices | writes more than one product into",
        "put two values into one memory | tied on 2 after share-parameters | has begun the next one",
    ],
    "results_belong_to_their_replicas": [
        "give another replicas result | pairs on 2 after share-parameters | are not those of",
        "exchange two buckets results | pairs on 2 after pack-gradients | are of another bucket",
    ],
    "shared_parameters_are_written_last": [
        "write shared parameters too early | pairs on 2 after lower-collectives | may write parameters that another"
    ],
    "slots_are_disjoint": [
        "drop a bucket | matrices, sent as a payload by worker 1 of 3 after send-payload | buckets are named by their",
        "overlap two slots | pairs on 2 after pack-gradients | the slots of",
        "let a slot leave its bucket | pairs on 2 after update-in-parts | ends outside of the bucket",
        "change a buckets dtype | pairs on 2 after insert-all-reduce | but f in it is torch",
        "change a buckets update rule | pairs on 2 after reuse-arguments | follows another update rule than the bucket",
    ],
    "slots_are_for_their_gradients": [
        "exchange results of a region | pairs on 2 after insert-all-reduce | is given for another output of",
        "give regions each others slots | pairs, clipped and least-loaded on 2 after lower-devices | is given for another",
    ],
    "slots_fit_their_variables": [
        "change a slots shape | pairs on 2 after replicate | the variable",
        "contradict a slots shape | pairs on 2 after lower-collectives | elements, not",
    ],
    "some_replica_has_examples": [
        "exchange the shards of two replicas | meetings, ragged on 3 after place-gradients | runs no graph, but has"
    ],
    "sparse_tables_have_separate_buckets": [
        "let a slot leave its bucket | sparse tables on 2 after update-in-parts | but its optimizer takes rows, of one",
        "change a buckets update rule | sparse tables on 2 after lower-collectives | is updated element by element, but",
    ],
    "stored_rows_are_those_of_the_step": [
        "send rows where others are written | sparse tables on 2, parameters not shared after send-rows | of which the",
        "send rows where others are written | sparse tables on 2, parameters not shared after lower-devices | of which the",
        "scale a sum | sparse tables on 2, parameters not shared after update-in-parts | which is not gathered for bucket",
    ],
    "tables_are_preserved": [
        "exchange two arguments | pairs on 2 after share-parameters | the pass has changed the program's"
    ],
    "updates_in_parts_take_shares_alone": [
        "make in parts what others take | pairs on 2 after schedule-overlap | is to make its gradient",
        "make in parts what others take | pairs on 2, parameters not shared after lower-devices | is to make its gradient",
    ],
    "values_are_kept_alike": [
        "drop a kept value | forward on 3, uneven after insert-all-reduce | keeps values under the numbers",
        "keep in another order | forward on 3, uneven after lower-devices | keeps values under the numbers",
    ],
    "values_have_their_types": [
        "let a region give another shape | pairs on 2 after reserve-memory | but is noted as",
        "exchange the programs of two devices | pairs on 2 after lower-devices | but is noted as",
    ],
    "variables_are_written_after_reads": [
        "use a view of a variable after it is written | pairs on 2, parameters not shared after send-rows | is written on",
        "use an undeclared view after its variable is written | pairs on 2, parameters not shared after lower-devices | is",
    ],
    "waits_are_on_the_same_side_of_the_commit": [
        "wait on one side of the commit | pairs on 2, parameters not shared after lower-collectives | its own: they would",
        "wait on one side of the commit | sparse tables on 2 after lower-devices | its own: they would wait for each",
    ],
    "workers_exchange_their_sums": [
        "change what a reduction does | gradients of worker 1 of 2, on 1 after lower-devices | but gradients are weighted",
        "look at another value | gradients of worker 1 of 2, on 1 after lower-collectives | is in flight to other workers",
    ],
    "workers_send_their_factors": [
        "pad another row | sent as factors, dealt out to worker 1 of 2 on 2 after reduce-over-workers | is not left as"
    ],
    "workers_update_equal_parts_in_their_order": [
        "update the part of another worker | own optimizer and AdamW, dealt out on 2 after shard-optimizer | are updated by"
    ],
}
