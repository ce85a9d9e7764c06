"""The parts without Horovod's optimizer: horovodrun -np 2 -H localhost:2 python -m hvfreeze.examples.parts"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from hvfreeze.comm.replica_sync import broadcast_model
from hvfreeze.config.freeze import FreezeConfig
from hvfreeze.examples.data import digits
from hvfreeze.freezing.freezer import freeze_by_vote
from hvfreeze.integration.script_world import script_world
from hvfreeze.torchvision_shim import torchvision

EPOCHS = 6
world = script_world()
torch.manual_seed(0)
mine = Subset(digits(512)[0], range(world.rank, 512, world.size))
loader = DataLoader(mine, batch_size=32, shuffle=True, drop_last=True)
model = torchvision.models.resnet18(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
broadcast_model(model, world)
# Settings that freeze within a few epochs; the default criterion waits until blocks stop improving.
votes = FreezeConfig(freeze="gradient-norm", eta_max=0.5)
freezer = freeze_by_vote(model, optimizer, world, steps_per_epoch=len(loader), num_epochs=EPOCHS, settings=votes)

for epoch in range(EPOCHS):
    model.train()
    for images, labels in loader:
        freezer.reducer.begin()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        freezer.reducer.finish()
        optimizer.step()
        freezer.after_step(loss.item())
    if world.rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}, {freezer.cut} blocks frozen", flush=True)
world.close()
