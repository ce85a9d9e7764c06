"""One HDF5 file of rows: its format, how it is written and published, and how it is verified and read.

The only folder that imports h5py.

A file `activations-<16 digits of the fingerprint>-<rank>of<size>.h5` has six fixed-size, contiguous, unfiltered
datasets in its root group, so that h5py alone reads it:

=================  =======================  ===========================================================================
dataset            shape, type              contents
=================  =======================  ===========================================================================
`activations`      (capacity, ...) f4, f2,  row i is the prefix's output for `sample_ids[i]` and `views[i]`; its
                   f8, or u2 (bfloat16)     dimensions are in physical order, given by the attribute `dimension_order`
                                            ("1,2,3": C, H, W; "2,3,1": H, W, C); attribute `dtype` is torch's type
`sample_ids`       (capacity,) i8           sample of each row; -1: the row was not written and means nothing
`views`            (capacity,) i4           view of each row, 0 without augmentation; -1 as above
`range_sha256`     (ranges, 32) u1          SHA-256 of each range of rows, bound to its place and the fingerprint
`manifest`         (bytes,) u1              JSON, padded with spaces: `identity` and `exactness` (the fingerprint's
                                            fields), `fingerprint` (its digest), `stored` and `computed` (types),
                                            `shape` (of a row) and `strides` (of a batch of `batch_rows`), `capacity`,
                                            `rows` (written, the first ones), `range_rows`, `owner`, `format`, `version`
`manifest_sha256`  (32,) u1                 SHA-256 over the manifest, the three tables and the type of `activations`
=================  =======================  ===========================================================================

File attributes: `format`, `version`, `cut`, `split`. While it is written, a file has the suffix `.tmp`, and a file
`.lock` names the writer. A published file never changes: completing a partial one publishes a new file in its place.
"""
